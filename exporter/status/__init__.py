"""The status page: what a person without Grafana sees at `/`.

Runs in the sidecar. Families and collectors' statuses come in, one HTML document goes out. The tree is the flow:
`readings` (families by name, and a few numbers of the last hour), `view` (what the page tells, and what of it is
wrong), `elements` (pieces of HTML), `document` (the page).
"""
