// fuzz.cpp: every parser of bytes that somebody else wrote, fed with anything. One program; the environment variable FUZZ names the target.
// Built with clang it is a libFuzzer program; with g++ it has a small driver of its own (below) that only mutates seeds. dev/fuzz/run.sh
// builds and runs it.
//
// A target refuses its input with an Error, or uses all of it. Anything else (another exception, a sanitizer's report, a broken promise) is
// a find. FUZZ_SEEDS=FOLDER writes seeds, made by the program's own writers, to FOLDER/TARGET/ and leaves.
#include <filesystem>
#include <random>

#include "data/documents.h"
#include "dev/test/small_model.h"
#include "llmc/dataloader.h"
#include "llmc/sentencepiece_unigram.h"

namespace {

constexpr i64 ANY_VOCAB = (i64)1 << 31;

[[noreturn]] void broken(const char* promise) {
    fprintf(stderr, "fuzz: broken promise: %s\n", promise);
    abort();
}
void promise(bool kept, const char* what) {
    if (!kept) { broken(what); }
}

// A folder of this process, in memory where there is such a thing; removed at the end.
const std::string& folder() {
    static const std::string name = [] {
        std::string pattern = is_directory("/dev/shm") ? "/dev/shm/fuzz.XXXXXX" : "/tmp/fuzz.XXXXXX";
        check(mkdtemp(pattern.data()) != nullptr, "cannot make a folder '%s': %s", pattern.c_str(), strerror(errno));
        return pattern;
    }();
    static const struct AtEnd {
        ~AtEnd() {
            std::error_code ignored;
            std::filesystem::remove_all(name, ignored);
        }
    } at_end;
    return name;
}
std::string write(const std::string& name, std::string_view bytes) {
    const std::string path = folder() + "/" + name;
    File file(path, "wb");
    file.write(bytes.data(), bytes.size());
    file.close();
    return path;
}
// Input that stands for several files: the parts between bytes 0xFF, which UTF-8 has not.
std::vector<std::string_view> parts(std::string_view bytes) {
    std::vector<std::string_view> found;
    for (size_t at = 0; at <= bytes.size();) {
        const size_t end = std::min(bytes.find('\xFF', at), bytes.size());
        found.push_back(bytes.substr(at, end - at));
        at = end + 1;
    }
    return found;
}

// ---------------------------------------------------------------------------------------------------------------
// Token files

void read_all(const std::string& path, WindowOrder order) {
    constexpr i64 S = 3, MOST = 1 << 16;
    const TokenFile file(path);
    file.describe();
    std::vector<int32_t> ids(std::min(file.tokens(), MOST));
    file.read(file.tokens() - (i64)ids.size(), ids.size(), ANY_VOCAB, ids.data());
    for (const int32_t id : ids) { promise(id >= 0, "ids are at least 0"); }
    DataRequest request = {path, S, ANY_VOCAB, 1, order};
    request.windows = 7;
    DataLoader loader(request);
    std::vector<int32_t> windows(7 * (S + 1));
    loader.next(7, 0, 7, windows.data());
    loader.read_sequential(0, windows.data());
}

void shard(std::string_view bytes) { read_all(write("x.bin", bytes), WindowOrder::shuffled); }

// Two bytes: the size of .bin; then the .idx.
void megatron_index(std::string_view bytes) {
    uint16_t size = 0;
    memcpy(&size, bytes.data(), std::min(bytes.size(), sizeof size));
    std::string bin(size, '\0');
    for (size_t i = 0; i < bin.size(); i += 2) { bin[i] = (char)i; }
    write("m.bin", bin);
    const std::string path = write("m.idx", bytes.substr(std::min(bytes.size(), sizeof size)));
    const MegatronIndex index(path, size);
    constexpr i64 MOST = 1 << 16;
    for (i64 s = 0; s < std::min(index.sequences(), MOST); s++) { index.length(s), index.pointer(s), index.mode(s); }
    for (i64 d = 0; d < std::min(index.documents(), MOST); d++) { index.first_sequence(d); }
    if (index.tokens() > MOST) { return; }  // sequences that lie over one another: no more than slow
    read_all(path, WindowOrder::shuffled);
}
void megatron_order(std::string_view bytes) {
    uint16_t size = 0;
    memcpy(&size, bytes.data(), std::min(bytes.size(), sizeof size));
    write("m.bin", std::string(size, '\1'));
    const std::string path = write("m.idx", bytes.substr(std::min(bytes.size(), sizeof size)));
    if (MegatronIndex(path, size).tokens() < 1 << 16) { read_all(path, WindowOrder::megatron); }
}

void side_file(std::string_view bytes) { read_token_set_info(write("x.json", bytes)); }

// ---------------------------------------------------------------------------------------------------------------
// Words of a command line and of recipes

void spec(std::string_view bytes) {
    const auto use = [](const std::string& text) {
        try {
            double sum = 0;
            for (const WeightedGlob& p : parse_data_spec(text).parts) {
                promise(p.weight >= 0 && !p.glob.empty(), "each part has a share and a glob");
                sum += p.weight;
            }
            promise(std::abs(sum - 1) < 1e-9, "shares add to 1");
        } catch (const Error&) {}
    };
    const std::string text(bytes);
    if (!text.starts_with('@')) { use(text); }
    use("@" + write("x.mix", bytes));
    for (const int part : {0, 1, 2}) {
        const Range range = megatron_split(text, part, 1000);
        promise(0 <= range.begin && range.begin <= range.end && range.end <= 1000, "a split's parts lie within the documents");
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Text

void documents(const std::string& path, const ReadOptions& options) {
    const FilterOptions keep = {};
    const Filter filter(keep);
    const std::vector<InputFile> files = {input_file(path)};
    DocumentReader reader(files, options, filter);
    Parsers parsers;
    RawDocument raw;
    for (std::string text; reader.next(raw, text); text.clear()) {
        const Document doc = parse_document(raw, raw.in(text), options, filter, parsers);
        promise(doc.skipped || simdjson::validate_utf8(doc.text.data(), doc.text.size()), "text is UTF-8");
    }
}
void json_lines(std::string_view bytes) { documents(write("x.jsonl", bytes), {}); }
void plain_text(std::string_view bytes) {
    ReadOptions options;
    options.doc_separator = bytes.size() % 2 ? "blank-lines" : "---";
    options.split_bytes = bytes.size() % 3 * 10;
    documents(write("x.txt", bytes), options);
}
void quality_signals(std::string_view bytes) {
    FilterOptions keep;
    keep.keep = {"a>=1"};
    const Filter filter(keep);
    simdjson::ondemand::parser parser;
    Fields fields;
    std::string line(bytes);
    if (simdjson::validate_utf8(line.data(), line.size())) { read_signals(line, filter, parser, fields); }
}

// ---------------------------------------------------------------------------------------------------------------
// Tokenizers

void use(const Tokenizer& tokenizer) {
    for (const std::string text :
         {"", " ", "the earth  was without form", "a\n\n\tb", "\xC3\xA9\xE6\x97\xA5\xF0\x9F\x98\x80 \xFF", "<s></s> 12's"}) {
        const std::vector<int32_t> ids = tokenizer.encode(text);
        for (const int32_t id : ids) { promise(id >= 0 && id < tokenizer.vocab_size(), "ids are in the vocabulary"); }
        const std::string back = tokenizer.decode(ids);
        promise(simdjson::validate_utf8(back.data(), back.size()), "decoded text is UTF-8");
    }
    for (i64 id = 0; id < tokenizer.vocab_size(); id++) { tokenizer.decode({(int32_t)id}); }
}
void sentencepiece(std::string_view bytes) {
    const auto tokenizer = load_tokenizer(write("t.model", bytes));
    use(*tokenizer);
    const auto model = parse_sentencepiece_model(bytes);  // long texts go another way, which must lead to the same place
    if (!model || (i64)model->pieces.size() != tokenizer->vocab_size() || !SentencePieceUnigram::can_encode(*model)) { return; }
    const SentencePieceUnigram unigram(*model, tokenizer->unknown_id);
    for (const std::string text : {"the earth  was", "\n\tab\xC3\xA9\xE6\x97\xA5\xFF", " <s>aaaa "}) {
        promise(unigram.encode(text) == tokenizer->encode(text), "ids are the library's");
    }
}
// vocab.json, then merges.txt.
void gpt2(std::string_view bytes) {
    const std::vector<std::string_view> files = parts(bytes);
    write("merges.txt", files.size() > 1 ? files[1] : "");
    use(*load_tokenizer(write("vocab.json", files[0])));
}

// ---------------------------------------------------------------------------------------------------------------
// Seeds

using Seeds = std::map<std::string, std::string>;  // name -> bytes

Seeds shard_seeds() {
    Seeds seeds;
    for (const i64 vocab : {1000, 70000}) {
        ShardWriter writer(folder() + "/s", vocab, SHARD_MAX_TOKENS);
        writer.write(std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, 999, (int32_t)vocab - 1});
        writer.publish();
        seeds[format("llmc%lld", (long long)vocab)] = read_text_file(shard_path(folder() + "/s", 0));
    }
    for (const uint8_t code : {1, 2, 3, 4, 5, 8}) {
        const uint64_t version = 1, slots = 8;
        std::string bytes = "LITPKDS" + std::string((const char*)&version, 8) + (char)code + std::string((const char*)&slots, 8);
        for (const char id : {1, 2, 3, 4, 5, 6, 2, 2}) { bytes += id + std::string(id_bytes((IdType)code) - 1, '\0'); }
        seeds[format("packed%d", code)] = bytes;
    }
    return seeds;
}
Seeds megatron_seeds() {
    Seeds seeds;
    for (const i64 vocab : {1000, 70000}) {
        MegatronWriter writer(folder() + "/w", vocab);
        for (const int n : {3, 0, 5, 1, 9}) { writer.add_document(std::vector<int32_t>(n, 7)); }
        writer.publish();
        const uint16_t size = std::filesystem::file_size(folder() + "/w.bin");
        seeds[format("%lld", (long long)vocab)] = std::string((const char*)&size, 2) + read_text_file(folder() + "/w.idx");
    }
    return seeds;
}
Seeds side_file_seeds() {
    TokenSetInfo info;
    info.tokenizer_file = "t.model", info.tokenizer_kind = "sentencepiece", info.tokenizer_hash = "00", info.vocab = 100;
    info.train = {1, 20, 20, {{"x_000000.bin", 20, "00"}}};
    write_token_set_info(folder() + "/i.json", info);
    return {{"info", read_text_file(folder() + "/i.json")}};
}
Seeds spec_seeds() {
    return {{"glob", "data/a_*.bin"},
            {"mix", "0.7:a*.bin, 3e-1:b/[c-d]_0*.bin"},
            {"recipe", "# shares\n7:a*.bin  # most\r\n\n3:b c\n"},
            {"split", "969,30,1"}};
}
Seeds json_seeds() {
    return {{"red_pajama", "{\"text\":\"one \\u00e9\\ud83d\\ude00\",\"meta\":{\"a\":[1,null]}}\n\n{\"meta\":{},\"text\":\"two\\n\"}\r\n"},
            {"broken", "\xEF\xBB\xBF{\"text\":\"\\ud83d\"}\n{\"text\":1}\n{\"raw_content\":\"x\"}\n{\"text\":\"cut"}};
}
Seeds text_seeds() { return {{"plain", "one\ntwo\n\n---\nthree \xC3\xA9\r\n"}, {"invalid", "a\xFF\xC3 b\n\xED\xA0\x80"}}; }
Seeds signal_seeds() { return {{"signals", "{\"id\":\"x/0\",\"metadata\":{},\"quality_signals\":{\"a\":[[0,3,1.5]],\"b\":[]}}"}}; }
Seeds sentencepiece_seeds() { return {{"bpe", train_small_model("bpe")}, {"unigram", train_small_model("unigram", 320)}}; }
Seeds gpt2_seeds() {
    // GPT-2's characters for bytes 33 to 126 are themselves; the others begin at U+0100.
    std::string json, merges = "#version: 0.2\nt h\nth e\n\xC4\xA0 the\n";
    int id = 0, other = 0;
    const auto add = [&](const std::string& token) { json += format("%s\"%s\": %d", id ? ", " : "{", token.c_str(), id), id++; };
    for (int byte = 0; byte < 256; byte++) {
        const bool itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        const int code = itself ? byte : 256 + other++;
        add(code < 128 ? (code == '"' || code == '\\' ? "\\" : "") + std::string(1, (char)code)
                       : std::string{(char)(0xC0 | code >> 6), (char)(0x80 | (code & 63))});
    }
    for (const char* token : {"th", "the", "\xC4\xA0the", "<|endoftext|>"}) { add(token); }
    return {{"small", json + "}\xFF" + merges}};
}

struct Target {
    const char* name;
    void (*run)(std::string_view bytes);
    Seeds (*seeds)();
};
constexpr Target TARGETS[] = {
    {"shard", shard, shard_seeds},
    {"megatron_index", megatron_index, megatron_seeds},
    {"megatron_order", megatron_order, megatron_seeds},
    {"side_file", side_file, side_file_seeds},
    {"spec", spec, spec_seeds},
    {"json_lines", json_lines, json_seeds},
    {"plain_text", plain_text, text_seeds},
    {"quality_signals", quality_signals, signal_seeds},
    {"sentencepiece", sentencepiece, sentencepiece_seeds},
    {"gpt2", gpt2, gpt2_seeds},
};

const Target& chosen() {
    const char* name = getenv("FUZZ");
    for (const Target& t : TARGETS) {
        if (name && !strcmp(name, t.name)) { return t; }
    }
    fprintf(stderr, "fuzz: FUZZ=%s: wanted one of", name ? name : "");
    for (const Target& t : TARGETS) { fprintf(stderr, " %s", t.name); }
    fprintf(stderr, "\n");
    exit(EXIT_USAGE);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    if (const char* seeds = getenv("FUZZ_SEEDS")) {
        for (const Target& t : TARGETS) {
            prepare_folder(std::string(seeds) + "/" + t.name);
            for (const auto& [name, bytes] : t.seeds()) { write_file_atomically(std::string(seeds) + "/" + t.name + "/" + name, bytes); }
            printf("%s\n", t.name);
        }
        exit(EXIT_OK);
    }
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Target& target = chosen();
    try {
        target.run({(const char*)data, size});
    } catch (const Error&) {}
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Without libFuzzer: fuzz [-max_total_time=SECONDS] FOLDER_OR_FILE...   mutates the seeds in the folders; of a file, only runs it.

#ifndef __clang__
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace {

std::string current;  // what runs now; saved if it is a find
void save_current() {
    FILE* file = fopen("find", "wb");
    if (file == nullptr) { return; }
    fwrite(current.data(), 1, current.size(), file);
    fclose(file);
    fprintf(stderr, "fuzz: the input is in the file 'find'\n");
}

std::string mutate(std::string bytes, const std::vector<std::string>& seeds, std::mt19937_64& random) {
    constexpr size_t MOST = 1 << 14;
    const auto below = [&](size_t n) { return n ? random() % n : 0; };
    for (int n = 1 + below(4); n > 0; n--) {
        const size_t at = below(bytes.size() + 1), length = below(std::min<size_t>(bytes.size() - at, 64) + 1);
        const std::string& other = seeds[below(seeds.size())];
        constexpr int64_t TELLING[] = {
            0, 1, -1, 2, 127, 128, 255, 256, 32767, 65535, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, (int64_t)1 << 32};
        const int64_t value = TELLING[below(std::size(TELLING))];
        switch (below(7)) {
            case 0:
                if (at < bytes.size()) { bytes[at] ^= (char)(1 << below(8)); }
                break;
            case 1:
                if (at < bytes.size()) { bytes[at] = (char)random(); }
                break;
            case 2:
                bytes.erase(at, length);
                break;
            case 3:
                bytes.insert(at, bytes.substr(below(bytes.size() + 1), length));
                break;
            case 4:
                bytes.insert(at, other.substr(below(other.size() + 1), below(64)));
                break;
            case 5:
                bytes.resize(at);
                break;
            default: {
                const size_t size = (size_t)1 << below(4);
                if (at + size <= bytes.size()) { memcpy(&bytes[at], &value, size); }
            }
        }
    }
    bytes.resize(std::min(bytes.size(), MOST));
    return bytes;
}

}  // namespace

int main(int argc, char** argv) {
    LLVMFuzzerInitialize(&argc, &argv);
    double seconds = 10;
    std::vector<std::string> seeds;
    bool only_run = false;
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument.starts_with("-max_total_time=")) { seconds = atof(argument.c_str() + strlen("-max_total_time=")); }
        if (argument.starts_with("-")) { continue; }
        only_run = only_run || !is_directory(argument);
        if (!is_directory(argument)) {
            seeds.push_back(read_text_file(argument));
            continue;
        }
        for (const auto& entry : std::filesystem::directory_iterator(argument)) { seeds.push_back(read_text_file(entry.path())); }
    }
    std::sort(seeds.begin(), seeds.end());
    seeds.resize(std::max<size_t>(seeds.size(), 1));
    if (__sanitizer_set_death_callback) { __sanitizer_set_death_callback(save_current); }
    std::set_terminate([] { save_current(), abort(); });
    signal(SIGABRT, [](int) { save_current(), _exit(EXIT_FAILED); });
    std::mt19937_64 random(1);
    i64 runs = 0;
    const auto begin = std::chrono::steady_clock::now();
    const auto run = [&](const std::string& bytes) {
        current = bytes;
        LLVMFuzzerTestOneInput((const uint8_t*)current.data(), current.size());
        runs++;
    };
    for (const std::string& seed : seeds) { run(seed); }
    while (!only_run && std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds) {
        for (int i = 0; i < 16; i++) { run(mutate(seeds[random() % seeds.size()], seeds, random)); }
    }
    printf("Done %lld runs\n", (long long)runs);
    return EXIT_OK;
}
#endif
