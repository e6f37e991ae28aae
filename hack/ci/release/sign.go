package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// publicKeyFile is the key that a signature without a signing service is verified with.
const publicKeyFile = "evenkeel-release.pub"

// signing says who signs. The checksums are signed, and they cover every file; images.txt and the chart have the images' digests.
type signing struct {
	key     string // private, in a file
	keyless bool   // by Sigstore's public service
}

// sign signs a file into FILE.sigstore.json, and puts the public key beside it where there is one.
func (s signing) sign(ctx context.Context, progress io.Writer, file string) error {
	box, err := toolbox.New(progress)
	if err != nil {
		return err
	}
	cosign, err := box.Path(ctx, "cosign")
	if err != nil {
		return err
	}
	bundle := file + ".sigstore.json"
	if s.keyless {
		return runCosign(ctx, cosign, filepath.Dir(file), "sign-blob", "--yes", "--bundle", bundle, file)
	}
	if s.key == "" {
		if s.key, err = ownKey(ctx, progress, cosign); err != nil {
			return err
		}
	}
	// The log and the time stamps of the public service are left out, so that signing takes no network.
	if err := runCosign(ctx, cosign, filepath.Dir(file), "sign-blob", "--yes", "--key", s.key, "--use-signing-config=false", "--tlog-upload=false", "--bundle", bundle, file); err != nil {
		return err
	}
	return runCosign(ctx, cosign, filepath.Dir(file), "public-key", "--key", s.key, "--outfile", filepath.Join(filepath.Dir(file), publicKeyFile))
}

// ownKey is a key of the user who runs this, which is made at first use.
func ownKey(ctx context.Context, progress io.Writer, cosign string) (string, error) {
	config, err := os.UserConfigDir()
	if err != nil {
		return "", fmt.Errorf("folder for the signing key: %w", err)
	}
	folder := filepath.Join(config, "evenkeel", "release")
	key := filepath.Join(folder, "cosign.key")
	if _, err := os.Stat(key); !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return "", fmt.Errorf("folder for the signing key: %w", err)
	}
	fmt.Fprintf(progress, "making a signing key: %s\n", key)
	return key, runCosign(ctx, cosign, folder, "generate-key-pair")
}

func runCosign(ctx context.Context, cosign, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, cosign, args...)
	cmd.Dir = dir
	cmd.Env = os.Environ()
	if _, ok := os.LookupEnv("COSIGN_PASSWORD"); !ok {
		cmd.Env = append(cmd.Env, "COSIGN_PASSWORD=") // else it asks the terminal
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cosign %s: %w\n%s", args[0], err, bytes.TrimSpace(out))
	}
	return nil
}
