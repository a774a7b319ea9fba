"""Grafana dashboards as code.

`python -m dashboards` writes the JSON files of `dashboards/json/`. The package is not installed with the exporter. Each
dashboard is one module with its panels in reading order; `panels` builds panels, `board` lays them out, `queries` expands
selectors.
"""
