"""HTTP: /metrics, health and the status page behind a connection guard.

Used in the sidecar. From outside in: `server` accepts, `connection` is one of them and the guard of all, `http` its
grammar, `routes` the answers, `workers` the threads on which they are made; `protection` is what web.config.yml
(`webconfig`) says, and checks passwords.
"""
