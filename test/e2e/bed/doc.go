// Package bed is a real Kubernetes for tests: API server, scheduler, controller manager, kubelets and
// containerd, built from Go modules by build.sh, in private namespaces of this machine.
//
// A bed has one control machine (etcd, API server, controller manager, scheduler) and one to nine node
// machines (containerd, kubelet). A machine is a process 1 in mount, PID, network, UTS, IPC and cgroup
// namespaces of its own, and what it runs. Its /dev, /run, /var/lib, /var/log and /etc are private, the
// rest of the file system is the host's.
//
// The test binary itself is the machines' process 1 (InitMachine), which starts commands on request
// over a socket. It ends when the pipe from the test breaks, and the kernel then ends all in its PID
// namespace: whatever becomes of the test, no process, mount or network interface is left. What a killed test
// does leave, cgroups and files, the next Up removes.
//
// The test reaches addresses of a machine by sockets that it makes in the machine's network namespace
// (Machine.Dial), so client-go works from the test process with nothing between.
//
// The bed never writes outside the machines' cgroups and the cache directory (build.sh), never changes a
// setting of the host, and needs root.
package bed
