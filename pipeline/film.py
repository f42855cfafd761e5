"""A short GIF of one episode, with the score so far in the picture."""

from pathlib import Path

import numpy as np

from pipeline.environments import Camera
from pipeline.rollout import VectorStep

PICTURES_PER_SECOND = 15  # What an agent of 4 emulator frames a step sees of 60 a second.
EVERY_STEPS = 2
SCALE = 2
STRIP_PIXELS = 24
COLOURS = 128
BLACK, WHITE = (0, 0, 0), (255, 255, 255)


class Film:
    """Watches lane 0's first episode through a camera; keeps every second step, at most ``seconds`` of pictures.

    Shown at twice the game's own speed: ``seconds`` of film are twice as many of play.
    """

    def __init__(self, camera: Camera, title: str, seconds: float) -> None:
        self._camera, self._title = camera, title
        self._most = int(seconds * PICTURES_PER_SECOND)
        self._pictures: list[np.ndarray] = [camera.picture]
        self._captions: list[tuple[float, int]] = [(0.0, 0)]
        self._steps, self._score = 0, 0.0
        self._is_over = False

    @property
    def score(self) -> float:
        """Of the filmed lane so far, as the camera's own game gave it."""
        return self._score

    def watch(self, step: VectorStep) -> None:
        if self._is_over:
            return
        self._score += self._camera.follow(int(step.act.action[0]))
        self._steps += 1
        self._is_over = bool(step.terminated[0] | step.truncated[0])
        if self._is_over or (self._steps % EVERY_STEPS == 0 and len(self._pictures) < self._most):
            self._pictures.append(self._camera.picture)
            self._captions.append((self._score, self._steps))

    def write(self, path: Path) -> None:
        """An endless GIF at ``path``; the last picture stays for two seconds."""
        from PIL import Image, ImageDraw

        some = np.concatenate([self._pictures[i] for i in np.linspace(0, len(self._pictures) - 1, 8).astype(int)])
        # One palette for all, so that only what moves differs between pictures; its first two colours are the text's.
        palette = Image.fromarray(some).quantize(COLOURS - 2, dither=Image.Dither.NONE).getpalette() or []
        colours = Image.new("P", (1, 1))
        colours.putpalette([*BLACK, *WHITE, *palette])
        images = []
        for picture, (score, steps) in zip(self._pictures, self._captions, strict=True):
            height, width = picture.shape[0] * SCALE, picture.shape[1] * SCALE
            game = Image.fromarray(picture).quantize(palette=colours, dither=Image.Dither.NONE)
            canvas = Image.new("P", (width, height + STRIP_PIXELS), 0)
            canvas.putpalette([*BLACK, *WHITE, *palette])
            canvas.paste(game.resize((width, height), Image.Resampling.NEAREST), (0, STRIP_PIXELS))
            draw = ImageDraw.Draw(canvas)
            draw.fontmode = "1"  # Without shades of grey, which the palette does not have.
            draw.text((6, 6), self._title, fill=1)
            draw.text((width - 6, 6), f"score {score:g}   step {steps}", fill=1, anchor="ra")
            images.append(canvas)
        milliseconds = 1000 // PICTURES_PER_SECOND
        images[0].save(
            path,
            save_all=True,
            append_images=images[1:],
            duration=[milliseconds] * (len(images) - 1) + [2000],
            loop=0,
        )

    def close(self) -> None:
        self._camera.close()
