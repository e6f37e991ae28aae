/* librocm_smi64 for tests: the devices of hip.c, all behind one PCIe switch. */
#include <stdint.h>

#include "lab.h"

enum { SUCCESS = 0, INVALID = 1, UNSUPPORTED = 2, PCIE = 1, HOPS = 2, WEIGHT = 40 };

struct version { uint32_t major, minor, patch; const char *build; };

int rsmi_init(uint64_t flags) { (void)flags; return SUCCESS; }

int rsmi_version_get(struct version *version) {
  *version = (struct version){5, 0, 0, "lab"};
  return SUCCESS;
}

int rsmi_num_monitor_devices(uint32_t *count) {
  *count = LAB_DEVICES;
  return SUCCESS;
}

/* The id has the domain above bit 32, the bus above bit 8 and the device above bit 3. */
int rsmi_dev_pci_id_get(uint32_t device, uint64_t *id) {
  if (device >= LAB_DEVICES) return INVALID;
  *id = (uint64_t)LAB_PCI_DOMAIN << 32 | (uint64_t)(device + 1) << 8;
  return SUCCESS;
}

int rsmi_topo_get_link_type(uint32_t from, uint32_t to, uint64_t *hops, int *type) {
  (void)from, (void)to;
  *hops = HOPS;
  *type = PCIE;
  return SUCCESS;
}

int rsmi_topo_get_link_weight(uint32_t from, uint32_t to, uint64_t *weight) {
  (void)from, (void)to;
  *weight = WEIGHT;
  return SUCCESS;
}

int rsmi_minmax_bandwidth_get(uint32_t from, uint32_t to, uint64_t *min, uint64_t *max) {
  (void)from, (void)to, (void)min, (void)max;
  return UNSUPPORTED;
}

int rsmi_status_string(int status, const char **text) {
  *text = status == SUCCESS ? "success" : status == INVALID ? "no such device" : "not part of the lab";
  return SUCCESS;
}
