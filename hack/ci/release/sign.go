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

// signing says who signs: the checksums, which cover every file, when a release is built, and each image when it is published.
type signing struct {
	key     string // private, in a file
	keyless bool   // by Sigstore's public service
}

// A signer signs by cosign.
type signer struct {
	cosign string
	key    string // private, in a file; empty: with the identity of a CI
}

// signer finds cosign and the key, which is made if it is the user's own and there is none yet.
func (s signing) signer(ctx context.Context, progress io.Writer) (signer, error) {
	box, err := toolbox.New(progress)
	if err != nil {
		return signer{}, err
	}
	by := signer{key: s.key}
	if by.cosign, err = box.Path(ctx, "cosign"); err != nil {
		return signer{}, err
	}
	if by.key == "" && !s.keyless {
		if by.key, err = ownKey(ctx, progress, by.cosign); err != nil {
			return signer{}, err
		}
	}
	return by, nil
}

// sign signs a file into FILE.sigstore.json, and puts the public key beside it where there is one.
func (s signer) sign(ctx context.Context, file string) error {
	args := []string{"sign-blob", "--yes", "--bundle", file + ".sigstore.json"}
	if s.key == "" {
		return s.run(ctx, append(args, file)...)
	}
	// The log and the time stamps of the public service are left out, so that signing takes no network.
	if err := s.run(ctx, append(args, "--key", s.key, "--use-signing-config=false", "--tlog-upload=false", file)...); err != nil {
		return err
	}
	return s.publicKey(ctx, filepath.Join(filepath.Dir(file), publicKeyFile))
}

// publicKey writes the public key into the file.
func (s signer) publicKey(ctx context.Context, file string) error {
	return s.run(ctx, "public-key", "--key", s.key, "--outfile", file)
}

// run runs cosign in the working directory, which the key's path may be relative to.
func (s signer) run(ctx context.Context, args ...string) error {
	return runCosign(ctx, s.cosign, "", args...)
}

// hasSigned is an error unless the release in the folder is of this signer, so that one public key, or one identity, verifies all.
func (s signer) hasSigned(ctx context.Context, folder string) error {
	want, err := os.ReadFile(filepath.Join(folder, publicKeyFile))
	switch {
	case errors.Is(err, fs.ErrNotExist) && s.key == "":
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s has no %s, so that a CI has signed it: sign its images with --keyless", folder, publicKeyFile)
	case err != nil:
		return fmt.Errorf("public key of the release: %w", err)
	case s.key == "":
		return fmt.Errorf("%s has %s, so that a key has signed it: sign its images with --key", folder, publicKeyFile)
	}
	work, err := os.MkdirTemp("", "evenkeel-release-")
	if err != nil {
		return fmt.Errorf("folder for the public key: %w", err)
	}
	defer os.RemoveAll(work)
	own := filepath.Join(work, publicKeyFile)
	if err := s.publicKey(ctx, own); err != nil {
		return err
	}
	got, err := os.ReadFile(own)
	if err != nil {
		return fmt.Errorf("public key of %s: %w", s.key, err)
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%s is not the key of %s: sign the images with the key that has signed the release, by --key", s.key, filepath.Join(folder, publicKeyFile))
	}
	return nil
}

// signImage signs an image of a registry, REGISTRY/NAME@DIGEST, and puts the signature beside it. It is in the form that admission
// controllers read: a tag, and not a bundle. Kyverno 1.17, policy-controller 0.15 and containers/image verify no bundle that a key has
// signed (kyverno issue 16267, policy-controller issue 1958, container-libs issue 388).
func (s signer) signImage(ctx context.Context, reference string) error {
	args := []string{"sign", "--yes", "--new-bundle-format=false", "--use-signing-config=false"}
	if s.key != "" {
		args = append(args, "--key", s.key, "--tlog-upload=false")
	}
	return s.run(ctx, append(args, reference)...)
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
