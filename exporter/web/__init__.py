"""HTTP: /metrics, health and the status page behind a connection guard.

Used in the sidecar. From outside in: `server` accepts, `connection` is one of them and
the guard of all, `wire` its bytes (plain or TLS), `http` one exchange in h11's grammar, `routes` the answers, `flights`
the threads on which they are made. `protection` holds what web.config.yml says (`webconfig`, `tls`, `auth`).
"""
