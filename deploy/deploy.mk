# Images, chart and manifests: what is installed in a cluster (docs/install.md, docs/images.md).
IMAGE_NAME ?= tranche.dev/tranche
# A tag v1.2.3 gives 1.2.3, commits behind it 1.2.3-4-gabc; without any tag 0.0.0-gabc. With +, as in
# 1.2.3+4, it would be no tag of an image.
DEPLOY_VERSION = $(shell git describe --tags --dirty 2>/dev/null | sed -n 's/^v//p' | grep . || \
	echo 0.0.0-g$$(git describe --always --dirty 2>/dev/null || echo unknown))
IMAGE_OUT := $(BUILD)/image
HELM := $(BUILD)/tools/helm
CHART := deploy/helm/tranche

.PHONY: images image-arm64 chart chart-package helm
# The arm64 binary carries arm64's files: an overlay puts them where amd64's lie.
image-arm64: arm64
	@$(MAKE) --no-print-directory $(ARM64)/bin/nvmlprobe BUILD=$(ARM64) CC=$(ARM64_CC)
	$(Q)STRIP=aarch64-linux-gnu-strip tools/embed.sh $(ARM64) $(ARM64)/assets $(GO_ASSETS)
	$(Q)(cd $(ARM64)/assets && find . -type f | sed 's|^\./\(.*\)|"$(GO_ASSET_DIR)/\1": "$(ARM64)/assets/\1"|' | \
		sort | paste -sd, | sed 's/.*/{"Replace": {&}}/') >$(ARM64)/overlay.json
	$(Q)GOARCH=arm64 CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -overlay $(ARM64)/overlay.json \
		-ldflags '-s -w -X main.version=$(GO_VERSION_TEXT)' -o $(ARM64)/bin/tranche ./cmd/tranche

images: build image-arm64 ## the image for amd64 and arm64, an OCI archive, and lists of its contents: build/image
	$(Q)$(GO) run ./tools/images -o $(IMAGE_OUT) -name $(IMAGE_NAME):$(DEPLOY_VERSION) -version $(DEPLOY_VERSION) \
		-revision "$$(git rev-parse HEAD)" -created "$$(git log -1 --format=%ct)" \
		amd64,$(BUILD)/bin/tranche,$(GO_ASSET_DIR)/SHA256SUMS,/lib/x86_64-linux-gnu,/usr/share/doc/libc6/copyright \
		arm64,$(ARM64)/bin/tranche,$(ARM64)/assets/SHA256SUMS,/usr/aarch64-linux-gnu/lib,/usr/share/doc/libc6-arm64-cross/copyright

# Helm comes from its Go module, as the bed has it (test/e2e/bed/build.sh): by the same flags, and with the client libraries of
# the Kubernetes there, so that each finds the other's in Go's cache.
HELM_MODULE := test/e2e/bed/modules/helm
helm: $(HELM) ## build helm: build/tools/helm
$(HELM): $(HELM_MODULE)/go.mod
	@mkdir -p $(@D)
	$(Q)cd $(HELM_MODULE) && CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -ldflags '-s -w' -o $(abspath $@) helm.sh/helm/v4/cmd/helm

chart: $(HELM) ## lint the chart, render it, hold it against Kubernetes 1.29 and 1.37
	@start=$$(date +%s); cd deploy/charttest && \
		TRANCHE_HELM=$(abspath $(HELM)) CGO_ENABLED=0 $(GO) test -trimpath -count=1 . $(CHART_ARGS); \
		status=$$?; echo "chart: $$(($$(date +%s) - start)) s"; exit $$status

chart-package: $(HELM) ## the chart as a file: build/chart
	@rm -f $(BUILD)/chart/tranche-*.tgz
	$(Q)$(HELM) package $(CHART) --version $(DEPLOY_VERSION) --app-version $(DEPLOY_VERSION) -d $(BUILD)/chart
