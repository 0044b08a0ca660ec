/* The simulated machine: one file, <dir>/state, mapped shared by every process that uses its GPUs
 * (the simulated libcuda and libnvidia-ml, and simctl).
 *
 * This header and state.c, spec.c, models.c, engine.c know nothing of CUDA: they are linked into
 * libcuda.so.1, libnvidia-ml.so.1 and simctl alike.
 *
 * Locks. sim_lock() is the machine's: memory counts, process slots, objects, xids. sim_gpu_lock()
 * is one GPU's: its engine. Order: machine, then GPU; never take the machine's lock while holding a
 * GPU's. Both are process-shared and robust: the death of a holder is recovered by the next one
 * (memory counts are recomputed from the slots; the engine by
 * sim_engine_repair). Hold them for microseconds only, never across a wait.
 *
 * Times are ns of CLOCK_MONOTONIC, memory is bytes, unless a name says otherwise. */
#ifndef SIMGPU_STATE_H
#define SIMGPU_STATE_H
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "engine.h"

#define SIM_MAGIC 0x55504755544d4953ull
#define SIM_VERSION 5u
#define SIM_MAX_GPUS 16
#define SIM_MAX_PROCS SIM_ENGINE_PROCS
#define SIM_MAX_OBJECTS 4096
#define SIM_MAX_XIDS 64

/* What a model is: constant facts. models.c has the table. */
struct sim_model {
	char key[24];  /* "a100-80g", as a spec names it */
	char name[64]; /* "NVIDIA A100-SXM4-80GB" */
	char brand[16]; /* "Tesla", "NVIDIA" */
	uint64_t memory;        /* bytes that CUDA can see in total (cuDeviceTotalMem) */
	uint64_t memory_nvml;   /* NVML total: memory plus what the driver reserves */
	uint64_t context_bytes; /* what a context takes */
	uint32_t cc_major, cc_minor;
	uint32_t sms;
	uint32_t max_threads_per_sm;
	uint32_t max_blocks_per_sm;
	uint32_t regs_per_sm;
	uint32_t smem_per_sm, smem_per_block_optin; /* bytes */
	uint32_t l2_bytes;
	uint32_t clock_khz, mem_clock_khz;
	uint32_t bus_bits;
	uint32_t mem_mbps;      /* device memory bandwidth, MB/s */
	uint32_t pcie_mbps;     /* host copies, MB/s */
	uint32_t pcie_gen, pcie_width;
	uint32_t pci_device_id; /* NVML form: device << 16 | vendor 0x10de */
	uint32_t pci_subsystem_id;
	uint32_t power_limit_mw;
	uint32_t nvlinks;       /* links of the chip */
	uint32_t mig_capable, async_engines, ecc, tcc_reserved;
};

/* Kinds of link between two GPUs: PCIe levels as `nvidia-smi topo -m` names them. */
enum sim_link_kind { SIM_LINK_NONE, SIM_LINK_PIX, SIM_LINK_PXB, SIM_LINK_PHB, SIM_LINK_NODE, SIM_LINK_SYS };
struct sim_link {
	uint8_t pcie;   /* enum sim_link_kind; SIM_LINK_NONE only on the diagonal */
	uint8_t nvlink; /* number of NVLinks, 0: none */
};

/* One process's part of one GPU. */
struct sim_proc_gpu {
	uint64_t memory;   /* bytes of physical memory that this process created and that count for
			    * it, contexts included. Under sim_lock. */
	uint64_t contexts; /* bytes of it that are contexts */
	uint64_t n_contexts;
	uint64_t peak;     /* highest `memory` ever */
	uint64_t start_us; /* CLOCK_REALTIME of its first context, 0: none yet */
	uint64_t reserved[3];
};

enum sim_proc_state { SIM_PROC_FREE, SIM_PROC_USED };

/* A process that called cuInit. It holds an OFD write lock on byte SIM_LOCK_PROC + index of the
 * state file, on a close-on-exec descriptor: inherited by fork, dropped by exec, released by the
 * kernel when the last holder is gone. Reaped (memory back) when the lock is free and the process
 * is a zombie, gone, or has run another program. */
struct sim_proc {
	uint32_t state;
	uint32_t pid;
	uint64_t starttime; /* field 22 of /proc/PID/stat */
	uint64_t pidns;     /* inode of /proc/self/ns/pid */
	uint64_t lock_free_since; /* reaper's note: when the lock was first seen free; 0 never */
	uint64_t claimed_ns;
	uint64_t generation; /* rises with each claim of this slot */
	char comm[16];
	uint64_t reserved[8];
	struct sim_proc_gpu gpu[SIM_MAX_GPUS];
};

/* Byte ranges of the state file used for OFD locks. */
#define SIM_LOCK_CREATE 0ll            /* flock(2) is used for creation; this byte is unused */
#define SIM_LOCK_PROC (1ll << 40)      /* + process slot: write lock of the process */
#define SIM_LOCK_OBJECT (1ll << 41)    /* + object: read lock per holder (importer, exported fd) */

/* A piece of physical memory that others than its creator may hold (exported VMM allocation, IPC
 * memory, pool). Under sim_lock. While its creator's slot lives and holds it, it is counted in the
 * slot; afterwards, as long as anyone holds a read lock on its byte, in sim_gpu.orphans. */
struct sim_object {
	uint32_t used;
	uint32_t kind;    /* private to the memory half */
	uint32_t gpu;
	uint32_t slot;    /* creator's slot */
	uint64_t slot_generation;
	uint32_t src_pid; /* where its bytes can be opened: /proc/src_pid/fd/src_fd at offset */
	int32_t src_fd;
	uint64_t src_start;
	uint64_t offset, size;
	uint64_t orphan;  /* 1: creator is gone or freed it */
	uint64_t serial;  /* unique; handles carry it so that a reused entry is noticed */
	uint64_t extra[6];
};

struct sim_gpu {
	struct sim_model model;
	char uuid[48];   /* "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx" */
	uint8_t uuid_bytes[16];
	char serial[24];
	char pci[16];    /* "0000:3b:00.0" (domain:bus:device.function) */
	uint32_t pci_domain, pci_bus, pci_dev;
	uint32_t minor;  /* /dev/nvidiaN */
	uint64_t capacity;  /* bytes that can be given out in total */
	uint64_t used;      /* sum over slots + orphans. sim_lock. Always <= capacity. */
	uint64_t orphans;   /* bytes of objects that outlived their creator */
	uint64_t peak;
	uint32_t lost;      /* fell off the bus: every call on it fails. Written by simctl. */
	uint32_t xid;       /* last XID, 0: none */
	pthread_mutex_t lock;
	uint32_t recovery;  /* what the driver says has to be done: 0 nothing, 1 reset. Set by faults */
	uint32_t mig;       /* spec: MIG mode is on; its instances are not modelled */
	uint64_t reset_ns, reset_busy_ns; /* last simctl recover: when, engine.busy_ns then */
	uint32_t hide_processes; /* spec: NVML gives no figures per process, as under MIG and vGPU */
	uint32_t numa_node;
	/* Busy time (the truth) of each process is engine.proc[slot].busy_ns, utilisation samples are
	 * engine.sample: advance the engine to now under `lock` before reading. */
	struct sim_engine engine __attribute__((aligned(64)));
};

struct sim_xid_event {
	uint64_t time_ns;
	uint32_t gpu, xid;
};

struct sim_state {
	uint64_t magic;
	uint32_t version;
	uint32_t n_gpus;
	uint64_t size; /* bytes of the file */
	pthread_mutex_t lock;
	/* the machine */
	char driver_version[32]; /* "550.163.01" */
	uint32_t cuda_version;   /* 12040 */
	uint32_t slice_us, switch_us; /* time slice and cost of a context switch */
	uint32_t launch_ns, sync_ns;  /* host cost of a launch, wake-up after a synchronise */
	uint32_t jitter_permille;     /* sigma of the log-normal kernel jitter */
	uint32_t queue_depth;         /* launch queue entries of a context */
	uint32_t sample_ms;           /* utilisation sample period */
	uint32_t numa_nodes;
	uint32_t seed;
	/* what a kernel without a name that says it is worth: so long for each wave of so many blocks
	 * to a multiprocessor, and so long at least */
	uint32_t kernel_wave_ns, kernel_wave_blocks, kernel_min_ns;
	uint32_t nvml_error; /* nvmlInit fails with it; 0: it does not. Written by simctl */
	uint64_t created_ns;
	uint64_t spec_hash;
	struct sim_link link[SIM_MAX_GPUS][SIM_MAX_GPUS];
	uint64_t xid_head; /* count of events ever; event n is in xid[n % SIM_MAX_XIDS] */
	struct sim_xid_event xid[SIM_MAX_XIDS];
	uint64_t object_serial;
	uint64_t object_top; /* objects from here on were never used */
	uint64_t config_reserved[63];
	struct sim_proc proc[SIM_MAX_PROCS];
	struct sim_object object[SIM_MAX_OBJECTS];
	struct sim_gpu gpu[SIM_MAX_GPUS]; /* the file ends after gpu[n_gpus - 1] */
};

/* --- state.c ---------------------------------------------------------------------------------- */

/* Opens (or creates from <dir>/spec) the state of the machine; dir NULL: $TRANCHE_SIM_DIR, else the
 * path written behind the mark in this library file, else /dev/shm/tranche-sim-<uid>/default. Maps
 * once in a process; later calls return the same. NULL: failed, and *why says in words. Claims no
 * process slot. Safe for concurrent use. */
struct sim_state *sim_state_open(const char *dir, const char **why);
/* The state if opened, else NULL. */
extern struct sim_state *sim_shared;
const char *sim_state_dir(void);
int sim_state_fd(void);

void sim_lock(void);
void sim_unlock(void);
void sim_gpu_lock(struct sim_gpu *g);
void sim_gpu_unlock(struct sim_gpu *g);

/* Claims this process's slot if it has none (cuInit does). Returns its index, -1 if the table is
 * full. */
int sim_proc_claim(void);
/* This process's slot index; -1 before sim_proc_claim (and always in libnvidia-ml and simctl). A
 * forked child has none: CUDA is unusable in it, as with the real driver. */
int sim_proc_slot(void);
/* Frees the slots and objects whose holders are gone; their work vanishes from the engines
 * (sim_engine_drop_proc), the figures stay until the slot is claimed again. Takes sim_lock itself. Cheap enough for each NVML query (a few system calls per
 * used slot). Whoever finds memory short, simctl, and NVML's process list call it. */
void sim_reap(void);
/* True if slot i's process runs (not a zombie, not gone). No lock needed. */
bool sim_proc_alive(const struct sim_proc *p);

/* Reserve bytes of GPU g for this process; false: capacity exceeded (after a reap). */
bool sim_mem_charge(int g, uint64_t bytes);
void sim_mem_uncharge(int g, uint64_t bytes);

/* Objects (process.c): see struct sim_object. New: index or -1; its bytes stay counted in this slot.
 * kind is the caller's, fd and offset say where its bytes are in this process. */
int sim_object_new(uint32_t kind, int gpu, int fd, uint64_t offset, uint64_t size);
/* The creator lets go of it: uncharges it. True: others hold it, so it is counted as orphan now and
 * its bytes must stay. */
bool sim_object_drop(int k);
/* A descriptor that holds the object for as long as it or a copy of it is open anywhere, and the object
 * that such a descriptor names (-1: none). */
int sim_object_export(int k);
int sim_object_of_fd(int fd);
/* An importer holds / lets go, as often as it likes. Hold fails if the object is gone or, serial not 0, another one. */
bool sim_object_hold(int k, uint64_t serial);
void sim_object_unhold(int k);
/* The object's bytes as a descriptor of this process, -1 if their source is gone. An importer that
 * outlives the source offers its own descriptor with sim_object_serve. */
int sim_object_open(int k);
void sim_object_serve(int k, int fd);

uint64_t sim_now_ns(void);     /* CLOCK_MONOTONIC */
uint64_t sim_realtime_us(void);
uint64_t sim_proc_starttime(uint32_t pid); /* 0: gone */
/* The number of slot i's process in the caller's PID namespace, as NVML gives it. Of a process that is not
 * in it or below: a number that no process has. */
uint32_t sim_proc_pid_here(int i);
/* Records the event and sets gpu.xid; an error that is not a program's asks for a reset (gpu.recovery).
 * Takes sim_lock. */
void sim_xid_raise(int g, uint32_t xid);

/* --- spec.c, models.c ------------------------------------------------------------------------- */
const struct sim_model *sim_model_find(const char *key);
const struct sim_model *sim_model_at(int i); /* NULL past the end */
/* Fills machine facts, GPUs and links of *s (zeroed by the caller) from spec text. 0, or -1 with
 * a message with line number in why[n]. dir seeds the UUIDs. */
int sim_spec_parse(const char *text, const char *dir, struct sim_state *s, char *why, size_t n);

/* --- tracing ($TRANCHE_SIM_TRACE=1|FILE), trace.c --------------------------------------------- */
extern int sim_trace_level; /* 0 off, 1: unimplemented calls and refusals, 2: each call */
void sim_trace_write(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
#define SIM_TRACE(...)                                                                             \
	do {                                                                                       \
		if (__builtin_expect(sim_trace_level, 0))                                          \
			sim_trace_write(__VA_ARGS__);                                              \
	} while (0)

/* engine.c is linked into all three. state.c calls sim_engine_init when it makes the file,
 * sim_engine_drop_proc when it reaps or claims a slot, sim_engine_repair when a GPU lock's holder
 * died, sim_engine_lose for simctl's `lose`. */
#endif
