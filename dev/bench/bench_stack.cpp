// bench_stack: what a network's stack takes from a loop of products on the same core, in seconds for each byte sent and received.
//
//   build/bench_stack '' N K OC fp32|bf16 SECONDS          on one host; waits for the other
//   build/bench_stack ADDRESS N K OC fp32|bf16 SECONDS     on the other; ADDRESS is the first one's
//
// The product of train_gpt.cu runs for SECONDS, then again while bytes flow both ways over one non-blocking connection, moved between the blocks of the
// product as collectives are. What it then computes less is the stack. Prints {"seconds_per_byte"}.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <thread>

#include "llmc/ops.h"

using namespace BACKEND;

constexpr int PORT = 29400, ROUNDS = 5;

double now_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Both ends of two connections between the hosts: for bytes, and for words.
std::array<int, 2> connections(const std::string& address) {
    sockaddr_in at = {};
    at.sin_family = AF_INET, at.sin_port = htons(PORT), at.sin_addr.s_addr = INADDR_ANY;
    std::array<int, 2> made;
    if (address.empty()) {
        const int one = 1, door = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(door, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
        check(bind(door, (sockaddr*)&at, sizeof(at)) == 0 && listen(door, 2) == 0, "port %d: %s", PORT, strerror(errno));
        for (int& fd : made) { fd = accept(door, nullptr, nullptr); }
        close(door);
        return made;
    }
    check(inet_pton(AF_INET, address.c_str(), &at.sin_addr) == 1, "'%s' is not an IPv4 address", address.c_str());
    for (int& fd : made) {
        for (int tries = 0;; tries++) {
            fd = socket(AF_INET, SOCK_STREAM, 0);
            if (connect(fd, (sockaddr*)&at, sizeof(at)) == 0) { break; }
            check(tries < 100, "no answer from %s: %s", address.c_str(), strerror(errno));
            close(fd);
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
    }
    return made;
}

void measure(char** argv) {
    const i64 N = atoll(argv[2]), K = atoll(argv[3]), OC = atoll(argv[4]);
    const double seconds = atof(argv[6]);
    Run run(1);
    const auto product_in = [&]<typename X>(X) {
        return [&run, N, K, OC, in = std::vector<X>(N * K, 0.5f), weight = std::vector<X>(OC * K, 0.5f), out = std::vector<X>(N * OC)]() mutable {
            matmul_forward(out.data(), OC, in.data(), weight.data(), (const X*)nullptr, N, K, OC, 1.0f, run);
        };
    };
    const std::function<void()> product = std::string(argv[5]) == "bf16" ? std::function<void()>(product_in(bf16())) : product_in(0.0f);
    const auto seconds_of_one = [&](double window) {
        i64 products = 0;
        const double begin = now_seconds();
        for (; now_seconds() - begin < window; products++) { product(); }
        return (now_seconds() - begin) / (double)products;
    };

    const auto [bulk, words] = connections(argv[1]);
    std::vector<char> outgoing(1 << 20), incoming(1 << 20);
    i64 sent = 0, received = 0;
    const auto receive = [&] {
        for (ssize_t n; (n = recv(bulk, incoming.data(), incoming.size(), MSG_DONTWAIT)) > 0;) { received += n; }
    };
    const auto move = [&] {
        for (ssize_t n; (n = send(bulk, outgoing.data(), outgoing.size(), MSG_DONTWAIT | MSG_NOSIGNAL)) > 0;) { sent += n; }
        receive();
    };
    const auto empty_the_wire = [&] {
        i64 others = 0;
        check(send(words, &sent, sizeof(sent), 0) == sizeof(sent), "the other host left: %s", strerror(errno));
        for (bool told = false; !told || received < others; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
            told = told || recv(words, &others, sizeof(others), MSG_DONTWAIT) == sizeof(others);
            receive();
        }
    };
    // The machine's own pace changes: short windows in turn.
    std::vector<double> shares, rates;
    for (int round = 0; round < ROUNDS; round++) {
        product();
        empty_the_wire();
        const double alone = seconds_of_one(seconds / ROUNDS);
        run.poll = move;
        seconds_of_one(0.1);  // TCP finds its pace
        const i64 before = sent + received;
        const double begin = now_seconds(), beside = seconds_of_one(seconds / ROUNDS);
        run.poll = nullptr;
        shares.push_back(1 - alone / beside), rates.push_back((double)(sent + received - before) / 2 / (now_seconds() - begin));
    }
    std::sort(shares.begin(), shares.end()), std::sort(rates.begin(), rates.end());
    printf("{\"seconds_per_byte\": %.4e}\n", shares[ROUNDS / 2] / rates[ROUNDS / 2]);
}

int main(int argc, char** argv) {
    try {
        if (argc != 7) { usage_error("bench_stack ADDRESS|'' N K OC fp32|bf16 SECONDS"); }
        measure(argv);
        return EXIT_OK;
    } catch (const Error& e) {
        fprintf(stderr, "bench_stack: %s\n", e.what());
        return e.exit_code;
    }
}
