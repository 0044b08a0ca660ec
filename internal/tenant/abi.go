// Package tenant is the Go side of the ABI between a slice's supervisor and the libraries in the
// tenant's processes (include/tranche_abi.h): the limits page, the usage ledger, and the recovery
// of what dead processes held. It never waits for another process, and it trusts nothing that it
// reads from a ledger, which the tenant can write: indices are bounded, amounts never wrap.
package tenant

// Mirror of include/tranche_abi.h; TestABI compares every size, offset and constant.
const (
	abiVersion  = 2
	limitsMagic = 0x5354494d494c5254
	ledgerMagic = 0x524547444c5254
	leasesMagic = 0x53455341454c5254

	MaxDevices = 16
	MaxProcs   = 1024
	uuidLen    = 48
	nameLen    = 64

	FileLimits = "limits"
	FileLedger = "ledger"
	// DirDefault is where a library looks when no directory was written into it.
	DirDefault = "/etc/tranche/slice"

	flagFailOpen = 1

	flagMemoryLimited = 1
	flagCoresLimited  = 2
	flagBurst         = 4
	flagLatency       = 8

	leaseRequired  = 1
	grantLocal     = 1
	grantContinues = 2
	grantCoupled   = 4
	leasesOffset   = 4096

	// BeatNs is how often the arbiter gives a sign of life; BeatStaleNs without one: it is dead.
	BeatNs      = 20_000_000
	BeatStaleNs = 200_000_000

	// Unit is the granule of account words in bytes.
	Unit       = 4096
	amountBits = 34
	slotBits   = 12
	opBits     = 18

	slotFree    = 0
	slotUsed    = 1
	slotOrphans = 2

	lockBase = 1 << 40

	coverWords = 2048

	// SliceMark stands before the slice directory in our library files.
	SliceMark  = "@@TRANCHE_SLICE@@"
	SliceField = 256
	// RpathMark starts the DT_RPATH that is replaced by the driver directory.
	RpathMark  = "/@@TRANCHE_DRIVER@@"
	RpathField = 256
)

const limitsFileSize = 8192

type limitsDev struct {
	uuid         [uuidLen]byte
	memoryLimit  uint64
	contextBytes uint64
	cores        uint32
	coresCeiling uint32
	flags        uint32
	weight       uint32
	reserved     [6]uint64
}

type limitsPage struct {
	magic       uint64
	version     uint32
	size        uint32
	generation  uint64
	nDevices    uint32
	flags       uint32
	heartbeatNs uint64
	name        [nameLen]byte
	reserved    [19]uint64
	dev         [MaxDevices]limitsDev
}

type grant struct {
	seq        uint64
	slot       uint32
	flags      uint32
	startNs    int64
	endNs      int64
	sinceNs    int64
	inFlightNs int64
}

type beside struct {
	totalNs int64
	sinceNs int64
}

type lease struct {
	word        uint32
	flags       uint32
	grant       [2]grant
	eligibleNs  int64
	tat         int64
	gpuTimeNs   uint64
	shareWanted uint32
	shareGot    uint32
	grants      uint64
	beside      [2]beside
	reserved    [8]uint64
}

type leasesPage struct {
	magic      uint64
	beatNs     int64
	arbiterPid uint32
	metered    uint32
	reserved   [5]uint64
	lease      [MaxDevices]lease
}

type account struct {
	word          uint64
	overhead      int64
	tat           int64
	gpuTimeNs     uint64
	throttledNs   uint64
	launches      uint64
	allocsRefused uint64
	demandSince   uint64
	activeUntil   uint64
	reserved      [7]uint64
}

type slotDev struct {
	op        uint64
	value     [2]uint64
	ack       uint64
	exported  uint64
	imported  uint64
	context   uint64
	gpuTimeNs uint64

	inFlight     uint32
	waiting      uint32
	waitingSince int64
	pendingNs    int64
	workEndNs    int64
	lastEndNs    int64
	longestNs    int64
	closedSeq    uint64
	firstNs      int64
}

type slot struct {
	state     uint32
	pid       uint32
	starttime uint64
	pidns     uint64
	hostPid   uint32
	abi       uint32
	claimedNs uint64
	reserved  [11]uint64
	dev       [MaxDevices]slotDev
}

type coverage struct {
	//lint:ignore U1000 only the libraries use it; its size is part of the layout
	word [coverWords]uint64
}

type ledgerPage struct {
	magic     uint64
	version   uint32
	size      uint32
	nSlots    uint32
	nextSlot  uint32
	bell      uint32
	reserved0 uint32
	clients   [MaxProcs / 64]uint64
	reserved  [28]uint64
	account   [MaxDevices]account
	slot      [MaxProcs]slot
	coverage  [MaxDevices][coverWords]uint64
}
