"""The status page: what a person without Grafana sees at `/`.

Runs in the sidecar. Families and collectors' statuses come in, one HTML document goes out. The tree is the flow:
`readings` (families by name), `history` (a few numbers of the last quarter of an hour), `view` (what the page tells),
`attention` (what of it is wrong), `document` (HTML).
"""
