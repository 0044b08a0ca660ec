# test.mk
