module tranche.dev/tranche

go 1.26
