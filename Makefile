# Everything runs in a virtual environment of its own; nothing is installed into the system but Debian packages, by root.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# The bed of the tests, where it can be installed: real uevents without hardware, a Prometheus to scrape, promtool.
PACKAGES = umockdev prometheus prometheus-alertmanager libudev1 systemd systemd-container gcc binutils kmod xz-utils zstd
# The virtual machine, also where no KVM is.
VM_PACKAGES = qemu-system-x86 mmdebstrap debian-archive-keyring erofs-utils e2fsprogs cpio busybox-static kmod xz-utils zstd util-linux

.PHONY: soak fuzz fuzz-corpus help simulate wheels test test-vm compare lint deps packages vm-packages bench clean

help: ## What can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/fmsupervisor: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.tested: pyproject.toml | $(BIN)/fmsupervisor
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

simulate: $(BIN)/fmsupervisor ## Run the daemon on a simulated HGX H200 host (ARGS="--scenario crash-loop --speed 10")
	@$(BIN)/fmsupervisor simulate $(ARGS)

deps: $(VENV)/.tested packages ## Install what the tests need

packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then sh packaging/install-test-packages $(PACKAGES); fi

vm-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then sh packaging/install-test-packages $(VM_PACKAGES); fi

test: deps vm-packages lint ## Run all tests (ARGS is passed to pytest)
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

test-vm: deps vm-packages ## Run the tests in the virtual machine (as root; built in build/vm, which is kept)
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests/vm $(ARGS)

compare: deps vm-packages ## Measure what start scripts and fmsupervisor survive, in the virtual machine; writes docs/reliability.md
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[compare]'
	$(BIN)/python tests/vm/compare.py

lint: $(VENV)/.tested ## Check style and types
	$(BIN)/ruff format --check --quiet fmsupervisor tests
	$(BIN)/ruff check --quiet fmsupervisor tests
	$(BIN)/mypy

wheels: $(BIN)/fmsupervisor ## Put the wheel and all wheels that it needs into dist/wheels, for a host without network
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --wheel-dir dist/wheels .

# Each in a process of its own: libFuzzer ends it at the first input that breaks the target. Inputs are kept in build/fuzz.
SECONDS      ?= 600
FUZZ_TARGETS ?= fabric_manager_log fabric_manager_config elf module_file host_files nvswitch_ioctl kernel_log \
                settings_file web_yml handover http_request

$(VENV)/.fuzzing: pyproject.toml | $(VENV)/.tested
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	@touch $@

soak: $(VENV)/.tested ## 10,000 deaths of Fabric Manager, 1,000 successors, 200 kills: prints a table (an hour or so)
	$(BIN)/python -m tests.soak.soak

fuzz: $(VENV)/.fuzzing ## Search for inputs that break a parser (SECONDS=600 for each; FUZZ_TARGETS="elf web_yml")
	@for target in $(FUZZ_TARGETS); do $(BIN)/python tests/fuzz/run.py $$target $(SECONDS) || exit 1; done

fuzz-corpus: $(VENV)/.fuzzing ## Keep the smallest part of build/fuzz with all its coverage for make test
	@for target in $(FUZZ_TARGETS); do $(BIN)/python tests/fuzz/run.py --keep $$target || exit 1; done

bench: $(VENV)/.tested ## Measure (about two minutes); prints figures, asserts nothing
	$(BIN)/python tests/bench/bench_log.py
	$(BIN)/python tests/bench/bench_daemon.py

clean: ## Remove what was made
	rm -rf $(VENV) build dist test-artifacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
