// NCCL between processes of one machine, for null.cpp: each writes its part to shared memory and reads the others'.
//
// A call returns when it has computed, since streams have nothing to wait for. Of a large tensor only the beginning is
// exchanged: the rest would only cost memory.
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
static const size_t PART = 1 << 20, MOST = 4 << 20;  // bytes at a time, and of a tensor

struct Slot {  // what a rank sends
    size_t bytes;
    char data[PART];
};
struct Shared {
    std::atomic<int> is_ready;
    pthread_barrier_t barrier;
    Slot slots[];
};
struct ncclComm {
    int rank, count, splits;
    std::string name;
    Shared *shared;

    ncclComm(std::string name, int count, int rank) : rank(rank), count(count), splits(0), name(name) {
        size_t bytes = sizeof(Shared) + count * sizeof(Slot);
        int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
        if (file < 0 || ftruncate(file, bytes)) perror("NULL GPU: shared memory"), abort();
        shared = (Shared *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (rank == 0) {
            pthread_barrierattr_t attributes;
            pthread_barrierattr_init(&attributes);
            pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
            pthread_barrier_init(&shared->barrier, &attributes, count);
            shared->is_ready = 1;
        }
        while (!shared->is_ready) usleep(1000);
        wait();
        if (rank == 0) shm_unlink(name.c_str());
    }
    void wait() { pthread_barrier_wait(&shared->barrier); }

    // Call read(rank, offset, data, bytes) with each part of what each rank sends; their sizes may differ.
    void exchange(const void *from, size_t bytes, const std::function<void(int, size_t, const char *, size_t)> &read) {
        bytes = std::min(bytes, MOST);
        for (size_t done = 0, longest = PART; longest == PART; done += PART) {
            Slot &own = shared->slots[rank];
            own.bytes = bytes > done ? std::min(PART, bytes - done) : 0;
            memcpy(own.data, (const char *)from + done, own.bytes);
            wait();
            longest = 0;
            for (int other = 0; other < count; other++) {
                Slot &slot = shared->slots[other];
                longest = std::max(longest, slot.bytes);
                read(other, done, slot.data, slot.bytes);
            }
            wait();
        }
    }
};

// ------------------------------------------------------------------------------------------- numbers

struct Bfloat16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &wide, 4);
        return value;
    }
    Bfloat16(float value) {
        uint32_t wide;
        memcpy(&wide, &value, 4);
        bits = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    }
};
static std::vector<double> factors;  // of the operators from ncclNumOps on, which multiply before they add

template <class Number> static void combine(void *sum, const void *part, size_t bytes, ncclRedOp_t op, int rank, int count) {
    Number *a = (Number *)sum;
    const Number *b = (const Number *)part;
    for (size_t i = 0; i < bytes / sizeof(Number); i++) {
        Number next = op < ncclNumOps ? b[i] : Number(b[i] * factors[op - ncclNumOps]);
        a[i] = rank == 0 ? next : op == ncclMax ? std::max<Number>(a[i], next) : op == ncclMin ? std::min<Number>(a[i], next)
             : op == ncclProd ? Number(a[i] * next) : Number(a[i] + next);
        if (op == ncclAvg && rank == count - 1) a[i] = Number(a[i] / count);
    }
}
static void combine_typed(ncclDataType_t type, void *sum, const void *part, size_t bytes, ncclRedOp_t op, int rank, int count) {
    switch (type) {
        case ncclInt8: return combine<int8_t>(sum, part, bytes, op, rank, count);
        case ncclUint8: return combine<uint8_t>(sum, part, bytes, op, rank, count);
        case ncclInt32: return combine<int32_t>(sum, part, bytes, op, rank, count);
        case ncclInt64: return combine<int64_t>(sum, part, bytes, op, rank, count);
        case ncclFloat32: return combine<float>(sum, part, bytes, op, rank, count);
        case ncclFloat64: return combine<double>(sum, part, bytes, op, rank, count);
        case ncclBfloat16: return combine<Bfloat16>(sum, part, bytes, op, rank, count);
        default: fprintf(stderr, "NULL GPU: no sums of NCCL's type %d\n", type), abort();
    }
}
static size_t size_of(ncclDataType_t type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

// --------------------------------------------------------------------------------------- communicators

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static std::atomic<int> number{0};
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/null-gpu-%d-%d", getpid(), number++);
    return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int count, ncclUniqueId id, int rank) {
    *comm = new ncclComm(id.internal, count, rank);
    return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int count, ncclUniqueId id, int rank, ncclConfig_t *) { return ncclCommInitRank(comm, count, id, rank); }
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int count, int rank, int, ncclUniqueId *ids, ncclConfig_t *) { return ncclCommInitRank(comm, count, ids[0], rank); }
EXPORT ncclResult_t ncclCommSplit(ncclComm_t whole, int color, int key, ncclComm_t *comm, ncclConfig_t *) {
    int own[] = {color, key}, count = 0, rank = 0;
    whole->exchange(own, sizeof own, [&](int other, size_t, const char *data, size_t bytes) {
        int theirs[2];
        if (bytes != sizeof theirs) return;
        memcpy(theirs, data, bytes);
        if (theirs[0] != color) return;
        count++, rank += theirs[1] < key || (theirs[1] == key && other < whole->rank);
    });
    std::string name = whole->name + "-" + std::to_string(whole->splits++) + "." + std::to_string(color);
    *comm = color == NCCL_SPLIT_NOCOLOR ? nullptr : new ncclComm(name, count, rank);
    return ncclSuccess;
}
EXPORT ncclResult_t ncclCommCount(ncclComm_t comm, int *count) { return *count = comm->count, ncclSuccess; }
EXPORT ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) { return *rank = comm->rank, ncclSuccess; }
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) { return *error = ncclSuccess; }
EXPORT ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
EXPORT const char *ncclGetErrorString(ncclResult_t) { return "an error of the null GPU"; }
EXPORT const char *ncclGetLastError(ncclComm_t) { return ""; }

// ------------------------------------------------------------------------------------------ collectives

EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t) {
    factors.push_back(type == ncclFloat64 ? *(double *)scalar : type == ncclBfloat16 ? float(*(Bfloat16 *)scalar) : *(float *)scalar);
    *op = ncclRedOp_t(ncclNumOps + factors.size() - 1);
    return ncclSuccess;
}
EXPORT ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t) {
    comm->exchange(from, count * size_of(type), [&](int rank, size_t offset, const char *data, size_t bytes) {
        memcpy((char *)to + rank * count * size_of(type) + offset, data, bytes);
    });
    return ncclSuccess;
}
EXPORT ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t) {
    comm->exchange(from, count * size_of(type), [&](int rank, size_t offset, const char *data, size_t bytes) {
        if (root < 0 || root == comm->rank) combine_typed(type, (char *)to + offset, data, bytes, op, rank, comm->count);
    });
    return ncclSuccess;
}
EXPORT ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return ncclReduce(from, to, count, type, op, -1, comm, stream);
}
EXPORT ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    for (int root = 0; root < comm->count; root++)
        ncclReduce((const char *)from + root * count * size_of(type), to, count, type, op, root, comm, stream);
    return ncclSuccess;
}
EXPORT ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t) {
    comm->exchange(from, comm->rank == root ? count * size_of(type) : 0, [&](int, size_t offset, const char *data, size_t bytes) {
        memcpy((char *)to + offset, data, bytes);
    });
    return ncclSuccess;
}
EXPORT ncclResult_t ncclBcast(void *values, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(values, values, count, type, root, comm, stream);
}

// Between two ranks: an all-to-all is a group of these, in which every rank takes part.
struct Message {
    void *values;
    size_t bytes;
    int peer;
    ncclComm_t comm;
};
static thread_local std::vector<Message> sent, received;
static thread_local int depth = 0;

static const Message *find(const std::vector<Message> &messages, int peer) {
    for (auto &each : messages)
        if (each.peer == peer) return &each;
    return nullptr;
}
EXPORT ncclResult_t ncclGroupStart() { return depth++, ncclSuccess; }
EXPORT ncclResult_t ncclGroupEnd() {
    if (--depth || (sent.empty() && received.empty())) return ncclSuccess;
    ncclComm_t comm = (sent.empty() ? received : sent)[0].comm;
    for (int distance = 0; distance < comm->count; distance++) {
        const Message *out = find(sent, (comm->rank + distance) % comm->count);
        int source = (comm->rank - distance + comm->count) % comm->count;
        const Message *in = find(received, source);
        comm->exchange(out ? out->values : nullptr, out ? out->bytes : 0, [&](int rank, size_t offset, const char *data, size_t bytes) {
            if (in && rank == source) memcpy((char *)in->values + offset, data, bytes);
        });
    }
    sent.clear(), received.clear();
    return ncclSuccess;
}
EXPORT ncclResult_t ncclSend(const void *values, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
    if (!depth) fprintf(stderr, "NULL GPU: ncclSend outside a group\n"), abort();
    sent.push_back({(void *)values, count * size_of(type), peer, comm});
    return ncclSuccess;
}
EXPORT ncclResult_t ncclRecv(void *values, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
    if (!depth) fprintf(stderr, "NULL GPU: ncclRecv outside a group\n"), abort();
    received.push_back({values, count * size_of(type), peer, comm});
    return ncclSuccess;
}
EXPORT ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    ncclGroupStart();
    for (int peer = 0; peer < comm->count; peer++) {
        size_t offset = peer * count * size_of(type);
        ncclSend((const char *)from + offset, count, type, peer, comm, stream);
        ncclRecv((char *)to + offset, count, type, peer, comm, stream);
    }
    return ncclGroupEnd();
}
