package main

import "net"

// notifyReady tells systemd that the service is up (sd_notify(3)). No socket: nobody asked.
func notifyReady(socket string) error {
	if socket == "" {
		return nil
	}
	// An address that begins with @ is in the abstract namespace, for systemd and for net alike.
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.Write([]byte("READY=1"))
	return err
}
