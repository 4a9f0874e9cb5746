.DEFAULT_GOAL := help
.PHONY: help setup model quickstart serve test check format bench-peers bench-control bench-sim sim-vs-real reproduce quality drill demo-autoscale clean
CONFIG ?= configs/cpu_tiny.yaml
MODEL ?=
TRACES ?= traces
VENV := .venv/bin

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Create .venv with the pinned CPU stack (once)
	@./setup.sh

model: setup ## Build the tiny random model into models/tiny (once)
	@$(VENV)/python -c "from pathlib import Path; from serve_app.tiny_model import build_tiny_model as b; b(Path('models/tiny'), Path('LICENSE'))"

quickstart: model ## Serve on this machine, replay a real trace slice, print the figures, stop
	@$(VENV)/tandem quickstart $(CONFIG)

serve: model ## Serve in the foreground; CONFIG=my.yaml or MODEL=/my/model for your own
	@$(VENV)/tandem serve $(CONFIG) $(if $(MODEL),--model $(MODEL))

test: model ## The whole test suite, real engines included
	@$(VENV)/python -m pytest

check: setup ## Lint, types and the pure tests (no ray, no vllm)
	@$(VENV)/ruff check . && $(VENV)/ruff format --check . && $(VENV)/mypy && $(VENV)/python -m pytest -q -m "not ray and not vllm and not gpu"

format: setup ## Format the code
	@$(VENV)/ruff check --fix . ; $(VENV)/ruff format .

bench-peers: model ## Measure against plain vLLM and Ray Serve LLM's own P/D (about 25 minutes)
	@$(VENV)/python -m serve_app.bench_peers

bench-control: setup ## Measure how long decisions take, and their cost at rest (about 8 minutes)
	@$(VENV)/python -m serve_app.bench_control

bench-sim: setup ## Measure how fast the simulator is on one core (about 6 minutes)
	@$(VENV)/python -m serve_app.bench_sim

sim-vs-real: model ## How near the simulator comes to real engines on this machine (about 20 minutes)
	@$(VENV)/python -m serve_app.sim_vs_real

reproduce: setup ## The papers' claims beside what our code gives (about 4 minutes)
	@$(VENV)/python -m serve_app.reproduce

quality: setup ## Every policy on four real traces in TRACES=folder: tuned on one slice, reported on another (about two hours)
	@$(VENV)/python -m serve_app.quality $(TRACES)

drill: model ## Break every part under load on real engines and check every token (about 15 minutes)
	@$(VENV)/tandem drill --fault all --json reports/drills.json

demo-autoscale: setup ## Compressed days through Ray Serve on emulated engines, sized jointly (about 45 minutes)
	@$(VENV)/python -m serve_app.demo_autoscale

clean: ## Remove .venv, built models and reports
	rm -rf .venv models reports build *.egg-info
