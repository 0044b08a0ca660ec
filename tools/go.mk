# The tranche binary. It carries the libraries, the simulated driver and nvmlprobe (go:embed, which
# cannot reach outside its package: hence the copies).
GO ?= go
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
GO_VERSION_TEXT = $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
GO_ASSETS := lib/libcuda.so.1 lib/libnvidia-ml.so.1 bin/nvmlprobe \
	sim/libcuda.so.1 sim/libnvidia-ml.so.1 sim/simctl
GO_ASSET_DIR := internal/assets/files

.PHONY: build tranche lint lint-go test-go generate
build: shim sim tranche ## build the libraries, the simulated driver and the tranche binary

tranche: $(BUILD)/bin/tranche

$(GO_ASSET_DIR)/SHA256SUMS: $(GO_ASSETS:%=$(BUILD)/%) tools/embed.sh
	$(Q)tools/embed.sh $(BUILD) $(GO_ASSET_DIR) $(GO_ASSETS)

# Go decides itself what is out of date.
.PHONY: $(BUILD)/bin/tranche
$(BUILD)/bin/tranche: $(GO_ASSET_DIR)/SHA256SUMS
	@mkdir -p $(@D)
	$(Q)CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false \
		-ldflags '-s -w -X main.version=$(GO_VERSION_TEXT)' -o $@ ./cmd/tranche

lint: lint-go ## vet and staticcheck (C: warnings are errors in every build)
lint-go:
	@test -z "$$(gofmt -l api cmd internal test bench tools)" || { gofmt -l api cmd internal test bench tools; exit 1; }
	$(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...

test-go: build ## tests of the Go code, with the race detector; one package at a time, as several measure time
	$(GO) test -race -p 1 ./...
	$(GO) test ./internal/simulate

generate: ## make generated files again
	cd tools/protogen && $(GO) run . ../../api display/display.proto
	$(GO) test ./internal/display -run 'Page|Metrics' -update
	$(GO) test ./cmd/tranche -run 'TestNodeFlagsPage|TestReferencePage' -update
	$(GO) mod tidy
