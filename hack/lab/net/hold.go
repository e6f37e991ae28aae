package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	holdName = "hold"
	sayReady = "ready"
	sayKeep  = "keep"
)

// startHolder starts the process that owns a lab, and returns when the lab is up. If this process exits before that, so
// does the holder.
func startHolder(ctx context.Context, c netns.Config) (*netns.Lab, error) {
	config, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	// Not CommandContext: the holder outlives this process and its terminal.
	cmd := exec.Command(self, holdName, string(config))
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	consent, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	defer consent.Close()
	report, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the lab's owner: %w", err)
	}
	stopped := context.AfterFunc(ctx, func() { consent.Close() })
	defer stopped()
	line, err := bufio.NewReader(report).ReadString('\n')
	if err != nil || strings.TrimSpace(line) != sayReady {
		cmd.Wait() // it has exited, or will; the line has its error
		return nil, errors.New(strings.TrimSpace(line))
	}
	if _, err := fmt.Fprintln(consent, sayKeep); err != nil {
		return nil, fmt.Errorf("the lab's owner exited early: %w", err)
	}
	return netns.Open(c.Name)
}

func holdCommand() *cobra.Command {
	return &cobra.Command{
		Use: holdName + " CONFIG", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := context.WithCancel(cmd.Context())
			defer stop()
			go func() {
				line, _ := bufio.NewReader(os.Stdin).ReadString('\n')
				if strings.TrimSpace(line) != sayKeep {
					stop()
				}
			}()
			if err := hold(ctx, args[0]); err != nil {
				fmt.Println(strings.ReplaceAll(err.Error(), "\n", "; "))
				return err
			}
			return nil
		},
	}
}

// hold owns a lab until ctx ends.
func hold(ctx context.Context, text string) error {
	var c netns.Config
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return fmt.Errorf("settings of the lab: %w", err)
	}
	lab, err := netns.Up(ctx, c)
	if err != nil {
		return err
	}
	fmt.Println(sayReady)
	<-ctx.Done()
	return lab.Down(ctx)
}
