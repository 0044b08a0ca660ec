# Shares in real time: docs/bench.md says what the figures mean. SHARES_REAL has flags, as in
# `make bench-shares-real SHARES_REAL='-quick -cases 30/60'`. With SHARES_REAL_JSON the figures
# are added to that file.
.PHONY: bench-shares-real $(BUILD)/bin/shares-real
SHARES_REAL_JSON ?= $(BUILD)/bench/shares-real.json
bench-shares-real: build $(BUILD)/bin/shares-real ## shares of tenants side by side in real time (45 minutes)
	$(if $(findstring shares-real.json,$(SHARES_REAL_JSON)),@rm -f $(SHARES_REAL_JSON))
	$(BUILD)/bin/shares-real -json $(SHARES_REAL_JSON) -svg $(BUILD)/bench/shares-real.svg $(SHARES_REAL)

# Go decides itself what is out of date.
$(BUILD)/bin/shares-real:
	@mkdir -p $(@D)
	$(Q)CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -ldflags '-s -w' -o $@ ./bench/shares-real
