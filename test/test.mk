# Tests that go beyond one part, and the gates.
#   make test    what a change must pass: unit tests, the suites over NVIDIA's real libraries
#                (downloaded, never installed; skipped with the reason where that cannot be), the
#                C suites of the libraries and of the simulated driver, half a minute of each fuzz target
#   make e2e     what takes a machine: the demo, sanitizers, Kubernetes (e2e/e2e.mk), the chart, arm64, Debian 11
# Both install what they lack when root, and say what to install otherwise.
ARM64 := $(BUILD)/arm64
ARM64_CC := aarch64-linux-gnu-gcc
# The C suites of all parts: each part names its own test-PART.
C_SUITES := $(filter-out test-c test-go test-san test-arm64,$(sort $(shell \
	sed -n 's/^\(test-[a-z0-9-]*\):.*/\1/p' $(filter-out test/%,$(MAKEFILE_LIST)) \
		$(wildcard shim/*.mk shim/*/*.mk shim/*/*/*.mk simgpu/*/*.mk gpuload/*.mk))))
# Those that have sanitizer builds: the libraries'. nvidia-smi is no program of ours to instrument.
SAN_SUITES := $(filter-out test-shimnvml-smi,$(filter test-ledger test-meter test-shim%,$(C_SUITES)))

.PHONY: setup setup-e2e nvidia test test-c fuzz e2e test-san debian11 arm64 test-arm64
setup: ## install what building, testing and the demo need (root), or say what
	@tools/setup.sh
setup-e2e: ## the same for `make e2e`
	@tools/setup.sh e2e

nvidia: ## download NVIDIA's libraries for the tests
	@tools/fetch-nvidia.sh

# The targets $(1) one after the other, with the time of each.
phases = @set -e; for t in $(1); do start=$$(date +%s); $(MAKE) $$t; echo "phase $$t: $$(($$(date +%s) - start)) s"; done

test: setup ## what a change must pass
	$(call phases,build lint test-c test-go fuzz)

FUZZ_TIME ?= 30s
fuzz: ## every fuzz target for FUZZ_TIME (30s each; 5m is the long form); FUZZ=REGEXP chooses
	@start=$$(date +%s); tools/fuzz.sh $(FUZZ_TIME) '$(or $(FUZZ),.)'; status=$$?; echo "fuzz: $$(($$(date +%s) - start)) s"; exit $$status

# One after the other: several measure time.
test-c: ## the C suites
	@set -e; for t in $(C_SUITES); do echo "== $$t"; $(MAKE) --no-print-directory $$t; done

e2e: setup-e2e ## what takes a machine: demo, sanitizers, Kubernetes, chart, arm64, Debian 11
	$(call phases,demo test-san e2e-kube chart test-arm64 debian11)

test-san: ## the libraries' suites under ASan and UBSan, then TSan
	@set -e; for san in asan tsan; do for t in $(SAN_SUITES); do \
		echo "== $$t, $$san"; $(MAKE) --no-print-directory $$t SAN=$$san; done; done

# test/debian11.sh returns 3 where it cannot be done, and 1 instead in CI.
debian11: build ## the libraries and tranche run inside Debian 11 (root)
	@test/debian11.sh || [ $$? = 3 ]

arm64: setup-e2e ## cross-compile the libraries and the simulated driver for arm64
	@$(MAKE) shim sim BUILD=$(ARM64) CC=$(ARM64_CC)

test-arm64: arm64 ## symbol versions of the arm64 libraries
	TRANCHE_TEST_ARM64=1 go test -count=1 -run TestArm64 ./test/elf
