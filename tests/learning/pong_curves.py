"""The curves of Pong runs: read from their MLflow databases, drawn from the results."""

import json
from pathlib import Path

import numpy as np

SMOOTHED_EPISODES = 10


def curve_of(folder: Path, name: str) -> list[list[float]]:
    """``[minutes, env steps, return]`` of the almost greedy evaluation lane's episodes, in order.

    Of all collectors of this run, one after the other; minutes count from the first collector's start, without the
    time between two parts.
    """
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{(folder / 'mlflow.db').absolute()}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, "tags.role = 'collect'", order_by=["start_time ASC"])
    curve, minutes_before, steps_before = [], 0.0, 0
    for run in runs:
        points = client.get_metric_history(run.info.run_id, "eval/episode_return")
        points = sorted(points, key=lambda point: point.step)
        for point in points:
            minutes = (point.timestamp - run.info.start_time) / 60_000
            curve.append([round(minutes_before + minutes, 2), steps_before + point.step, point.value])
        if points:
            minutes_before, steps_before = curve[-1][0], int(curve[-1][1])
    return curve


def learner_settings_of(folder: Path) -> dict[str, str]:
    """What the learner's run logged as its parameters, but for paths and names."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{(folder / 'mlflow.db').absolute()}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run, *_) = client.search_runs(experiments, "tags.role = 'learn'", order_by=["start_time ASC"])
    parts = ("learner.", "limiter.", "replay.", "publish.", "train.threads", "train.seed")
    settings = {name: value for name, value in run.data.params.items() if name.startswith(parts)}
    return settings | {"commit": run.data.params.get("provenance.commit", "")}


def draw_curves(results: Path, chart: Path) -> None:
    """Every run's evaluation episodes, smoothed, over minutes and over env steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for path in sorted(results.glob("*.json")):
        record = json.loads(path.read_bytes())
        curve = np.array(record["curve"]).reshape(-1, 3)
        if len(curve) < SMOOTHED_EPISODES:
            continue
        smooth = np.convolve(curve[:, 2], np.ones(SMOOTHED_EPISODES) / SMOOTHED_EPISODES, "valid")
        label = f"{record['name']}: {record['greedy']['mean']:.1f} greedy"
        axes[0].plot(curve[SMOOTHED_EPISODES - 1 :, 0], smooth, label=label)
        axes[1].plot(curve[SMOOTHED_EPISODES - 1 :, 1] / 1e6, smooth)
    axes[0].set_xlabel("minutes of wall-clock")
    axes[1].set_xlabel("million env steps")
    axes[0].set_ylabel("return")
    for each in axes:
        each.axhline(18, color="grey", linewidth=0.8, linestyle="--")
        each.set_ylim(-21.5, 21.5)
    axes[0].legend(loc="lower right", fontsize="small")
    figure.suptitle(f"ALE/Pong-v5, evaluation lane (epsilon 0.001), means of {SMOOTHED_EPISODES} episodes")
    chart.parent.mkdir(exist_ok=True)
    figure.savefig(chart, dpi=110)
    pyplot.close(figure)
