.PHONY: demo
demo: setup ## a slice that holds its limits, on a simulated GPU if there is no real one
	@$(MAKE) build
	@demo/demo.sh
