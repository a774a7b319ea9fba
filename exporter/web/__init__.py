"""HTTP: /metrics, health and the landing page behind a connection guard."""
