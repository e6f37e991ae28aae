/* What the parts of the lab share. */
#ifndef LAB_H
#define LAB_H

#include <stdint.h>

/* Every process sees all devices of its host. A host has no PCI domain of this number, so RCCL finds nothing about them in sysfs. */
enum { LAB_DEVICES = 8, LAB_PCI_DOMAIN = 0xffff, LAB_WARP = 64 };

/* lab_run_kernel runs a kernel of RCCL to its end, on the thread of its stream: the communicator in device memory, its channels as
 * bits, and their first work items. */
void lab_run_kernel(const void *communicator, uint64_t channels, const void *work);

/* lab_flip_received flips one bit of the next data that a kernel of this process receives. */
void lab_flip_received(void);

#endif
