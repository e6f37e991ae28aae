package toolbox

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
)

const (
	// pytorchTestsVersion is the version of PyTorch in Debian 13. Its source has tests of torch.distributed; the
	// packages on PyPI have none. Later versions of PyTorch run these tests too. Where one does not, the test fails
	// with Gloo as well.
	pytorchTestsVersion = "2.6.0"
	pytorchTestsArchive = "pool/main/p/pytorch/pytorch_" + pytorchTestsVersion + "+dfsg.orig.tar.xz"
	pytorchTestsSHA256  = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"
)

// PyTorchTests returns the folder test/distributed of PyTorch's sources. It is in the cache, and comes from Debian the
// first time.
func PyTorchTests(ctx context.Context, progress io.Writer) (string, error) {
	dir, err := cached(ctx, progress, "pytorch-tests-"+pytorchTestsVersion, func(work, dir string) error {
		fmt.Fprintf(progress, "downloading PyTorch's tests %s\n", pytorchTestsVersion)
		return unpackSource(ctx, pytorchTestsArchive, pytorchTestsSHA256, work, dir, "*/test/distributed")
	})
	return filepath.Join(dir, "test", "distributed"), err
}
