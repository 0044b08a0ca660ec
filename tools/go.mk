# go.mk
