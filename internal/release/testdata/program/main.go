// A program with a module in it, for the tests.
package main

import "golang.org/x/sys/unix"

func main() { unix.Exit(0) }
