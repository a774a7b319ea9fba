"""The machine: CPUs, memory, disks, filesystems, network, RDMA, NFS and Lustre."""
