# The ledger's protocol alone: processes that charge, give back, fork and are killed.
LEDGER_TEST := $(SHIM_OUT)/test/ledger_kill
$(LEDGER_TEST): shim/test/ledger_kill.c shim/common/ledger.c $(SHIM_HEADERS)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SHIM_CFLAGS) $< shim/common/ledger.c -o $@

.PHONY: test-ledger
test-ledger: $(LEDGER_TEST) ## the ledger under kill -9
	$(LEDGER_TEST) $(SHIM_OUT)/test/ledger.$$$$ 40 6
