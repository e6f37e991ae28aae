/* The functions of MPI that NVIDIA's nccl-tests use, over Evenkeel's collectives. There is no mpirun, ssh or daemon.
 *
 * The environment says which rank a process is, and where the ranks meet:
 *
 *   RANK or, in an Indexed Job, JOB_COMPLETION_INDEX; WORLD_SIZE    (or the variables of mpirun, MPICH or Slurm)
 *   MASTER_ADDR and MASTER_PORT, where rank 0 serves a store; or EVENKEEL_STORE
 *   EVENKEEL_MPI_TIMEOUT    seconds to wait for the ranks to come, and later for anything to move (300)
 *
 * A function returns MPI_SUCCESS or does not return. On an error it prints one line to stderr, tells the other ranks, which end
 * as well, and ends the process with status 1. Exit handlers do not run.
 *
 * One thread at a time calls these functions. Buffers hold as many elements as the call says. The buffers of a call must not
 * overlap.
 */
#ifndef EVENKEEL_MPI_H
#define EVENKEEL_MPI_H

#ifdef __cplusplus
extern "C" {
#endif

typedef int MPI_Comm;
typedef int MPI_Datatype;
typedef int MPI_Op;

#define MPI_SUCCESS 0

#define MPI_COMM_NULL ((MPI_Comm)0)
#define MPI_COMM_WORLD ((MPI_Comm)1)
/* As the color of MPI_Comm_split: this rank gets MPI_COMM_NULL. */
#define MPI_UNDEFINED (-1)

/* As what is sent: it is in the buffer that is received into, at its place. */
#define MPI_IN_PLACE ((void *)-1)

#define MPI_DATATYPE_NULL ((MPI_Datatype)0x100)
#define MPI_BYTE ((MPI_Datatype)0x101)
#define MPI_INT ((MPI_Datatype)0x102)
#define MPI_LONG ((MPI_Datatype)0x103)
#define MPI_LONG_LONG ((MPI_Datatype)0x104)
#define MPI_INT64_T ((MPI_Datatype)0x105)
#define MPI_DOUBLE ((MPI_Datatype)0x106)

#define MPI_SUM ((MPI_Op)0x201)
#define MPI_MIN ((MPI_Op)0x202)
#define MPI_MAX ((MPI_Op)0x203)

/* Waits for all ranks. The arguments are not used, and may be NULL. */
int MPI_Init(int *argc, char ***argv);
/* Waits for all ranks, and leaves them. Afterwards no function can be called. */
int MPI_Finalize(void);

int MPI_Comm_rank(MPI_Comm comm, int *rank);
int MPI_Comm_size(MPI_Comm comm, int *size);
/* The communicator of the ranks with the same color, in the order of their keys, and of their ranks where keys are equal. */
int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm *newcomm);
/* Sets *comm to MPI_COMM_NULL. */
int MPI_Comm_free(MPI_Comm *comm);

int MPI_Barrier(MPI_Comm comm);
int MPI_Bcast(void *buffer, int count, MPI_Datatype datatype, int root, MPI_Comm comm);
/* sendbuf may be MPI_IN_PLACE. There is no sum, minimum or maximum of MPI_BYTE. */
int MPI_Allreduce(const void *sendbuf, void *recvbuf, int count, MPI_Datatype datatype, MPI_Op op, MPI_Comm comm);
/* sendbuf may be MPI_IN_PLACE: then sendcount and sendtype are not used. recvcount is that of one rank. */
int MPI_Allgather(const void *sendbuf, int sendcount, MPI_Datatype sendtype, void *recvbuf, int recvcount,
                  MPI_Datatype recvtype, MPI_Comm comm);
/* The same, at the root. The other ranks do not use recvbuf, recvcount and recvtype. */
int MPI_Gather(const void *sendbuf, int sendcount, MPI_Datatype sendtype, void *recvbuf, int recvcount,
               MPI_Datatype recvtype, int root, MPI_Comm comm);

#ifdef __cplusplus
}
#endif

#endif
