// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0
/* What nvidia-needs-dep.ko depends on. Without it the kernel says "Unknown symbol nvidia_dep_is_here (err -2)". */
#include <linux/export.h>
#include <linux/module.h>

#include "nvidia_stub.h"

bool nvidia_dep_is_here(void)
{
	return true;
}
EXPORT_SYMBOL(nvidia_dep_is_here);

MODULE_DESCRIPTION("A dependency of the nvidia stub");
MODULE_LICENSE("Dual MIT/GPL");
