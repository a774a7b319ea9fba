"""Web server of the sidecar: listener, connections, connection guard, routes, worker threads, TLS and passwords."""
