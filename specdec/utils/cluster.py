"""Ray, joined where it runs or started on this machine alone."""

import itertools
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from ipaddress import ip_address
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SHARED = "/dev/shm"  # where Ray keeps objects
LOCAL = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's switch, read when it is imported
# which Ray sets where it starts a cluster: its token lies in the home directory
AUTH = "RAY_AUTH_MODE"
# in which Ray gives a job's command what the job's owner has set
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
MISSING = "Ray is not installed: pip install 'specdec-lightning[ray]'"


def join(address: str | None, namespace: str | None = None, **options: Any) -> Any:
    """The module ``ray``, connected; one that this process has connected before stays as it is.

    Workers run in an empty folder of Ray's, so no file of the working folder is imported there, and relative
    paths start elsewhere. In a job of Ray's, what its owner has set stays (:data:`JOB`), so that workers run in the
    job's ``working_dir`` and import from its ``PYTHONPATH``.

    Args:
        address: of a cluster that runs: ``auto`` for the one this machine belongs to, ``ray://HOST:10001``, ...; None
            starts one, without dashboard and usage statistics, whose servers listen on loopback alone.
        options: more of ``ray.init``.

    Raises:
        ValueError: Ray is not installed, or cannot be had there.
    """
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_USAGE_STATS_PROMPT_ENABLED="0")
    if not address or address.startswith("127."):
        # for machines that are in no cluster: all servers listen on loopback
        os.environ[LOCAL] = "0"
    if not address:
        options["include_dashboard"] = False
    try:
        import ray
    except ImportError as error:
        raise ValueError(MISSING) from error
    if ray.is_initialized():
        return ray
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with tempfile.TemporaryDirectory() as empty:
            # unless it gets a folder, Ray puts the working folder before all libraries
            options["runtime_env"] = _beside_the_job(
                {"working_dir": empty, "env_vars": _import_variables()}
            )
            ray.init(
                address or "local", namespace=namespace, log_to_driver=False, logging_level=logging.ERROR, **options
            )  # fmt: skip
    except Exception as error:
        raise ValueError(
            f"Ray cannot be had at {address or 'this machine'}: {last_line(error)}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray puts its own there
    if not address and not ip_address(ip := ray.util.get_node_ip_address()).is_loopback:
        ray.shutdown()
        raise ValueError(
            f"Ray was imported before, and its servers would listen on {ip}, for everyone: set {LOCAL}=0 before it is "
            "imported"
        )
    if not address and os.path.isdir(SHARED):
        free = shutil.disk_usage(SHARED).free
        size = ray.cluster_resources()["object_store_memory"]
        if free < size:
            log.warning(
                "%s has %s MB free, of %s MB for Ray's objects, which go to a disk instead: give it more, in a "
                "container by docker run --shm-size", SHARED, f"{free / 1e6:,.0f}", f"{size / 1e6:,.0f}"
            )  # fmt: skip
    return ray


def _beside_the_job(environment: dict[str, Any]) -> dict[str, Any]:
    """The fields and variables that the job in which this process runs, if any, has not set: Ray refuses the others."""
    job = json.loads(os.environ.get(JOB) or "{}").get("runtime_env") or {}
    taken = job.get("env_vars") or {}
    variables = {name: text for name, text in environment["env_vars"].items() if name not in taken}
    fields = {name: value for name, value in environment.items() if name not in job}
    return fields | {"env_vars": variables}


def _import_variables() -> dict[str, str]:
    """The variables by which a worker imports from where this process does; Ray adds what its servers have inherited as
    ``PYTHONPATH``."""
    variables = {name: os.environ[name] for name in ("PYTHONSAFEPATH",) if name in os.environ}
    root = str(Path(__file__).resolve().parents[2])
    library = os.path.realpath(os.path.dirname(os.__file__))
    front = itertools.takewhile(lambda place: place != library, map(os.path.realpath, sys.path))
    # specdec is run from a checkout that is not installed
    if root in front:
        variables["PYTHONPATH"] = root
    return variables


def last_line(error: BaseException) -> str:
    """Of an error's message; its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
