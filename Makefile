# Every target sets up what it needs; a new machine has only Python 3.11 to 3.13, make and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: $(shell sed -n 's/^\([a-z][a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help:  ## List the targets.
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

setup: $(READY)  ## Make .venv and install everything, pinned.

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "Python 3.11 to 3.13 is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)  ## Collect ALE/Pong-v5 and learn from it at the same time, about three minutes; then verify.
	$(BIN)/python jobs/demo.py

test: $(READY)  ## All fast tests.
	$(BIN)/python -m pytest -m 'not slow' --durations=15

lint: $(READY)  ## Style, formatting, types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: bench-collect bench-learner bench-replay bench-offline  ## All benchmarks, each against its bound.

bench-collect: $(READY)  ## Where a collector's time goes.
	$(BIN)/python -m tests.benchmarks.collect

test-faults: $(READY)  ## Kills and starts in full numbers, about fifteen minutes.
	$(BIN)/python -m pytest tests/faults tests/pipeline/test_ratio.py -m slow --timeout 1800

test-memory: $(READY)  ## Ray Data over ten times the memory that it was given, about a minute.
	$(BIN)/python -m pytest tests/pipeline/test_ray_memory.py -m slow --timeout 300

test-tracking: $(READY)  ## Four writers for a minute against sqlite, an MLflow server, and one with PostgreSQL behind it.
	$(BIN)/python -m pytest tests/tracking --timeout 900 -v

MINUTES ?= 20
PONG_MINUTES ?= 120
soak: $(READY)  ## Both jobs for MINUTES with kills at random moments; then every shard is read.
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES)

bench-learner: $(READY)  ## An update against its bare kernels: time, memory, waiting for data.
	$(BIN)/python -m tests.benchmarks.learner

learn-recall: $(READY)  ## A task that needs memory, learnt in a minute or two by three seeds; and the control without.
	$(BIN)/python -m tests.learning.recall

learn-cartpole: $(READY)  ## CartPole with its velocities hidden, three seeds.
	$(BIN)/python -m tests.learning.cartpole

learn-pong: $(READY)  ## Pong from nothing by the two jobs, up to two hours (PONG_MINUTES=); writes results/pong and docs/pong.png.
	$(BIN)/python -m tests.learning.pong --minutes $(PONG_MINUTES)

ablate: $(READY)  ## The article's claims: runs what is missing in results/ (hours), then writes docs/claims.md.
	$(BIN)/python jobs/ablate.py

bench-upkeep: $(READY)  ## What logging and checkpoints cost the learner.
	$(BIN)/python -m tests.benchmarks.upkeep

bench-replay: $(READY)  ## The replay's speed, memory and disk against their bounds; writes docs/performance.md.
	$(BIN)/python -m tests.benchmarks.replay

bench-peers: $(READY)  ## The replay beside dm-reverb and torchrl; installs them (about 8 GB, asks before; YES=1 answers).
	$(BIN)/python -m tests.benchmarks.peers

bench-replay-restart: $(READY)  ## A learner on 1e5 Pong sequences, killed with -9 and started again.
	$(BIN)/python -m tests.benchmarks.replay_restart

bench-actors: $(READY)  ## Actors with a network, by table, at random; what submissions block; what a table knows.
	$(BIN)/python -m tests.benchmarks.actors

bench-offline: $(READY)  ## Ray Data and relabelling against a plain loop, a bare decoder and a bare network.
	$(BIN)/python -m tests.benchmarks.offline

demo-cluster: $(READY)  ## S3 server, replay service with a token, two Ray collectors, learner: three minutes; then verify.
	$(BIN)/python jobs/demo_cluster.py

test-cluster: $(READY)  ## Nodes, actors, services and S3 servers killed under running jobs, about ten minutes.
	$(BIN)/python -m pytest tests/cluster tests/pipeline/test_object_store.py -m slow --timeout 600

bench-service: $(READY)  ## Ray collectors against one process; how soon shards reach a learner through S3.
	$(BIN)/python -m tests.benchmarks.service

clean:  ## Remove the environment, what the demo made and what the benchmarks measured on.
	rm -rf $(VENV) .demo .bench
