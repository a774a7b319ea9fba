"""Web server of the sidecar: listener, connections and their guard, routes, worker threads, TLS and passwords."""
