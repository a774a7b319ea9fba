"""HTTP: /metrics, health and the status page behind a connection guard.

Used in the sidecar. From outside in: `server` accepts, `guard` keeps the number of connections, `connection` is
one of them, `wire` its bytes (plain or TLS), `http` one exchange in h11's grammar, `routes` the answers, `flights`
the threads on which they are made. `protection` holds what web.config.yml says (`webconfig`, `tls`, `auth`).
"""
