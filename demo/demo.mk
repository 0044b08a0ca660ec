.PHONY: demo
demo: setup ## a slice that holds its limits, on a simulated GPU if there is no real one
	@echo "Building the libraries, the simulated driver and tranche (half a minute the first time)."
	@$(MAKE) --no-print-directory build
	@demo/demo.sh
