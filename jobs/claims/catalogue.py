"""The article's claims C1 to C23, and what each is held to."""

from dataclasses import dataclass

import numpy as np

from jobs.claims.results import Cell
from jobs.claims.verdicts import Harmless, Loses, Measured, Part, Spread


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim. It holds when all its parts do; ``note`` says how it was read, or what of it cannot be tested here."""

    text: str
    parts: tuple[Part, ...]
    note: str = ""


def efficiency(cell: Cell) -> float:
    """1 over the env steps to the first look at half the best possible score; 0 when it was never reached."""
    reached = [look[1] for look in cell.looks if look[2] >= 0.5]
    return 1e6 / reached[0] if reached else 0.0


def calm(cell: Cell) -> float:
    """1 over the largest gradient norm of the first 50 updates: low for what explodes."""
    return 1 / cell.values["largest gradient norm of the first updates"]


def final(cell: Cell) -> float:
    """The last looks, where a plateau shows."""
    return float(np.mean([look[2] for look in cell.looks[-3:]]))


CARTPOLE, RECALL = "masked-cartpole", "recall"
CLAIMS: dict[str, Claim] = {
    "C1": Claim(
        text="Cutting the state at TBPTT segment borders costs 22 %; carrying it costs almost nothing.",
        parts=(
            Loses(task=RECALL, condition="segments, cut", control="segments, carried", least=0.22),
            Loses(task=CARTPOLE, condition="segments, cut", control="segments, carried", least=0.22),
            Harmless(task=RECALL, condition="segments, carried"),
            Harmless(task=CARTPOLE, condition="segments, carried"),
        ),
        note="Segments of 16 steps. Recall needs a gradient over 40 steps, CartPole over a few.",
    ),
    "C2": Claim(
        text="Stateless actors use 60 % less CPU; twice as many fit.",
        parts=(Measured(measurement="acting", figure="share of processor time saved", least=0.6),),
        note="The article's network on Pong, 8 lanes, one thread, against acting without a network. "
        "`make bench-actors` has whole processes.",
    ),
    "C3": Claim(
        text="L = 80 is the sweet spot: throughput falls by 2.7x at 160 for +3.7 % performance.",
        parts=(
            Measured(measurement="update speed", figure="throughput of L 80 over that of L 160", least=2.5),
            Loses(task=CARTPOLE, condition="ours", control="long burn-in", least=0.037),
        ),
        note="Throughput at equal trained steps. The gain is that of a four times longer burn-in on a small task.",
    ),
    "C4": Claim(
        text="The Initializer adds 0.3 % parameters and converges 18 % faster; the linear one is within 2 %.",
        parts=(
            Measured(measurement="initializer share", figure="percent of parameters, mlp", unit="%", most=0.4),
            Loses(task=CARTPOLE, condition="zero states alone", control="initializer", least=0.18, value=efficiency),
            Harmless(task=CARTPOLE, condition="linear initializer", control="initializer", margin=0.02),
        ),
        note="Faster: env steps to half the best score, against zero start states, both without burn-in.",
    ),
    "C5": Claim(
        text="int8 quantised h0/c0 collapses training.",
        parts=(
            Loses(task=CARTPOLE, condition="int8 states", least=0.5),
            Loses(task=RECALL, condition="int8 states", least=0.5),
        ),
        note="Collapse is read as losing half the score.",
    ),
    "C6": Claim(
        text="n = 3 beats 1 and 5.",
        parts=(
            Loses(task=CARTPOLE, condition="n = 1"),
            Loses(task=CARTPOLE, condition="n = 5"),
        ),
    ),
    "C7": Claim(
        text="alpha = 0.5 beats higher values.",
        parts=(
            Loses(task=CARTPOLE, condition="alpha 0.7"),
            Loses(task=CARTPOLE, condition="alpha 0.9"),
        ),
    ),
    "C8": Claim(
        text="0.997^1000 is 0.05.",
        parts=(Measured(measurement="discount", figure="0.997^1000", least=0.045, most=0.055),),
    ),
    "C9": Claim(
        text="Hashing the first 100 bytes of a frame collides in fewer than 0.001 % of frames.",
        parts=(
            Measured(measurement="hashing", figure="percent of distinct frames that collide", unit="%", most=0.001),
        ),
        note="Five games under random play; a frame collides when another, different one shares those bytes.",
    ),
    "C10": Claim(
        text="A submission blocks the actor for at most 120 microseconds.",
        parts=(
            Measured(measurement="submission", figure="microseconds blocked, median", unit="us", most=120),
            Measured(measurement="submission", figure="microseconds blocked, 99th percentile", unit="us", most=120),
        ),
    ),
    "C11": Claim(
        text="Forget-gate bias 0 makes the first updates explode.",
        parts=(
            Loses(task=CARTPOLE, condition="no forget bias", least=0.9, value=calm),
            Loses(task=RECALL, condition="no forget bias", least=0.9, value=calm),
        ),
        note="To explode is read as ten times the gradient norm of the control within the first 50 updates.",
    ),
    "C12": Claim(
        text="Priority by the first step's error plateaus; by the maximum it does not.",
        parts=(Loses(task=CARTPOLE, condition="first-step priorities", control="maximum priorities", value=final),),
        note="A plateau is read as a lower score in the last three looks.",
    ),
    "C13": Claim(
        text="Zero start states lose to stored states, and burn-in helps both.",
        parts=(
            Loses(task=CARTPOLE, condition="zero states alone", control="stored states alone"),
            Loses(task=CARTPOLE, condition="stored states alone"),
            Loses(task=CARTPOLE, condition="zero states alone", control="zero states"),
        ),
    ),
    "C14": Claim(
        text="Masking the loss by (1 - done_t) is right.",
        parts=(Harmless(task="short-recall", condition="terminal step dropped"),),
        note="On a task whose only reward is at the terminal step.",
    ),
    "C15": Claim(
        text="After done, keeping next_obs as the current observation is right (article 5.2's own listing).",
        parts=(
            Harmless(task=RECALL, condition="finished frame kept"),
            Harmless(task="short-recall", condition="finished frame kept"),
        ),
        note="Recall shows its cue in the first observation, which the finished episode's frame replaces.",
    ),
    "C16": Claim(
        text="35 % better sample efficiency than Ape-X and about twice as fast.",
        parts=(Loses(task=CARTPOLE, condition="no recurrence", least=0.35),),
        note="Control: the feed-forward ablation of the same preset. Its wall-clock on other hardware is not tested.",
    ),
    "C17": Claim(
        text="20-step segments need 1/50 of the memory of 1000 steps.",
        parts=(
            Measured(
                measurement="segment memory", figure="memory of 1000 steps over that of 20-step segments", least=45
            ),
        ),
        note="Bytes kept for the backward pass, a network of 0.4 M parameters.",
    ),
    "C18": Claim(
        text="Each further sequence in a batch costs 280 MB and gives 1.2 % throughput.",
        parts=(
            Measured(measurement="batch costs", figure="MB for each further sequence", unit="MB", least=250, most=310),
            Measured(
                measurement="batch costs",
                figure="percent of throughput for each further sequence",
                unit="%",
                least=0.6,
                most=1.8,
            ),
        ),
        note="The article's network on a CPU, from two sequences to four; throughput on its GPU is not tested.",
    ),
    "C19": Claim(
        text="seq_len above 100 costs 35 % throughput, below 50 loses dependencies (its own task: CartPole-v1).",
        parts=(
            Measured(
                measurement="update speed", figure="percent of throughput lost from T 80 to T 160", unit="%", least=30
            ),
            Loses(task="cartpole", condition="T = 16", control="T = 128"),
        ),
        note="Sequences of 16 and 128 with as many trained steps an update.",
    ),
    "C20": Claim(
        text="States from actors with different versions differ 10x in norm and destabilise training.",
        parts=(
            Measured(measurement="state norms", figure="largest ratio of state norms between versions", least=10),
            Loses(task=CARTPOLE, condition="old parameters"),
        ),
        note="Versions of one run; actors that get parameters every 200 updates instead of every 10.",
    ),
    "C21": Claim(
        text="Dropping sequences shorter than L is harmless.",
        parts=(
            Harmless(task=CARTPOLE, condition="short sequences dropped"),
            Harmless(task="short-recall", condition="short sequences dropped"),
        ),
        note="Shorter than the unroll, at episodes' ends.",
    ),
    "C22": Claim(
        text="alpha = 0.5 and n = 3 lower the variance between runs.",
        parts=(Spread(task=CARTPOLE, condition="alpha 0.9, n = 5"),),
        note="Against alpha 0.9 and n = 5, the paper's.",
    ),
    "C23": Claim(
        text="Feeding the current action together with the observation (the article's listing 4.3) is right.",
        parts=(Harmless(task=CARTPOLE, condition="current action fed in"),),
        note="Acting cannot know the action before it is chosen: it feeds the previous one.",
    ),
}


def conditions(part: Part) -> list[tuple[str, str]]:
    """(experiment, variant) pairs that a part needs; a measurement's variant is empty."""
    if isinstance(part, Measured):
        return [(part.measurement, "")]
    return [(part.task, part.control), (part.task, part.condition)]
