"""Where networks run."""

import torch


def refuse_device(device: str | None) -> None:
    """Raise ValueError unless this machine has ``device``; None leaves the choice to the job."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # The latter from a torch that was built without the device.
        allowed = ["cpu"]
        if torch.cuda.is_available():
            allowed.append("cuda")
        raise ValueError(f"device is {device!r}; allowed on this machine: {', '.join(allowed)}") from None
