package toolbox

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
)

const (
	// pytorchTestsVersion is that of PyTorch's sources in Debian 13, whose tests of torch.distributed are run. The
	// packages of PyTorch on PyPI have none. Later versions run them too: where one does not, the test fails with Gloo as
	// well.
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
