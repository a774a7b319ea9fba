"""What `import torch` calls where training-exporter is installed (entry point group `torch.backends`).

A module outside of the package, so that nothing of it is imported, and nothing happens, unless `EXPORTER_AUTO=1`, which
`python -m exporter run` sets for the job. Whatever goes wrong here stays here: an exception would make `import torch`
fail.
"""

import os


def start() -> None:
    """Install the bridges into this process, if its environment asks for it."""
    if os.environ.get("EXPORTER_AUTO") != "1":
        return
    try:
        from exporter.bridges import install  # noqa: PLC0415  # see above

        install()
    except Exception:  # noqa: BLE001, S110  # see above; what a bridge cannot do it tells itself
        pass
