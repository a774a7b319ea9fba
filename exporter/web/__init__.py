"""HTTP behind a connection guard: `server` accepts, `connection` talks, `routes` answers, `workers` make it."""
