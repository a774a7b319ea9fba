"""Grafana dashboards: what each shows, as code, and the JSON that Grafana reads.

`python -m dashboards` writes `dashboards/json/`; nothing of the exporter imports this package and it is not
installed with it. Standard library only. A dashboard is one module: its panels in the order in which they are
read; `panels` says what every panel has, `board` lays them out, `queries` expands the selectors.
"""
