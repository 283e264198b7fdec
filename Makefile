# Everything a user or developer starts. `make serve` works on a fresh machine with Python 3.10+ and nothing else.
.PHONY: setup serve test check clients clean

ARGS ?=

setup: ## .venv, the project, the embedded target (see scripts/setup for PYTHON and TORCH_INDEX_URL)
	@scripts/setup

serve: setup ## start the server; ARGS="--port 9000" for options
	@.venv/bin/dspark serve $(ARGS)

test: setup ## all tests that need no GPU; ARGS="-k name" to choose
	@.venv/bin/python -m pytest $(ARGS)

check: setup ## formatting, lint, types, protos
	@scripts/check

clients: setup ## independent clients against real servers (docs/clients.md); ARGS="lm_eval guidellm" to choose
	@PYTHONPATH=tests .venv/bin/python -m clients.run $(ARGS)

clean: ## remove the environment and build products; the cache of models stays
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis test-artifacts
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +
