"""HTTP: /metrics, health and the status page behind a connection guard.

Used in the sidecar. From outside in: `server` accepts, `connection` is one of them and the guard of all, `wire` its
bytes (plain or TLS), `http` its grammar, `routes` the answers, `workers` the threads on which they are made;
`protection` is what web.config.yml (`webconfig`, `tls`) says, with passwords and the rate limit in `auth`.
"""
