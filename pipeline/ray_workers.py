"""Pieces of work on Ray: one function, many arguments, results as they come."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.ray_start import start_ray


def run_on_workers(
    function: Callable[..., Any], arguments: Sequence[tuple], workers: int, *, cpus: int = 1
) -> Iterator[Any]:
    """``function(*one)`` for each of ``arguments`` as Ray tasks, ``workers`` at a time; results as they finish.

    A task that dies with its worker is run again, so ``function`` must do no harm when it is run twice. What it raises
    is raised here, and ends the tasks that still run.

    Raises:
        ValueError: no machine of this Ray has ``cpus``: it would wait for one for ever.
    """
    import ray
    from ray.exceptions import RayTaskError

    start_ray()
    most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if cpus > most:
        raise ValueError(f"threads is {cpus}; allowed: at most {most:g} a worker, as the largest machine of Ray has")
    task = ray.remote(num_cpus=cpus, max_retries=3)(function_of(function))
    waiting, running = list(arguments)[::-1], []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(task.remote(*waiting.pop()))
            (done,), running = ray.wait(running, num_returns=1)
            try:
                yield ray.get(done)
            except RayTaskError as error:
                raise error.cause if isinstance(error.cause, Exception) else error from None
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def function_of(callable_object: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function, for Ray takes no callable objects."""

    def run(*arguments: Any) -> Any:
        return callable_object(*arguments)

    return run
