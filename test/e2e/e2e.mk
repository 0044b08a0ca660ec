# The end-to-end bed: a real Kubernetes in namespaces of this machine (docs/e2e.md).
.PHONY: e2e-bed e2e-kube bench-kube bed
e2e-bed: setup-e2e ## build the bed's Kubernetes and runtime into the cache (once per version, minutes)
	@start=$$(date +%s); test/e2e/bed/build.sh >/dev/null; echo "e2e-bed: $$(($$(date +%s) - start)) s"

# The machines' own test is first: it says more where the machine lacks something.
e2e-kube: e2e-bed build ## the tests on the bed (root)
	@start=$$(date +%s); TRANCHE_E2E=1 $(GO) test -count=1 -timeout 40m -v ./test/e2e/bed ./test/e2e $(E2E_ARGS); \
		status=$$?; echo "e2e-kube: $$(($$(date +%s) - start)) s"; exit $$status

bench-kube: e2e-bed build ## pods a second through a real kube-scheduler, beside an extender that does nothing (root)
	@TRANCHE_E2E=1 TRANCHE_E2E_RATES=1 $(GO) test -count=1 -timeout 20m -v -run TestSchedulerThroughput ./test/e2e

bed: e2e-bed build ## a bed to play with, until Ctrl-C (root; BED_ARGS="-nodes 2 -chart")
	@$(GO) build -o $(BUILD)/test/bed ./test/e2e/bed/cmd/bed
	@exec $(BUILD)/test/bed $(BED_ARGS)
