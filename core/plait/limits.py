"""Every maximum, with its reason. What comes from outside is checked against these at the door."""

from typing import Final

MIB: Final = 1 << 20

# Identity -----------------------------------------------------------------------------------------
WORDS_MAX: Final = 1 << 48  # the fingerprint's key is (word << 16) | value: 48 bits of word number
TENSORS_MAX: Final = 1 << 20  # a large mixture of experts has about 10^5 tensors
TENSOR_NAME_BYTES_MAX: Final = 1024
TENSOR_RANK_MAX: Final = 16
TENSOR_ELEMENTS_MAX: Final = (
    1 << 53
) - 1  # of sides that aren't 0: an empty tensor has a shape, too

# Frames -------------------------------------------------------------------------------------------
FRAME_ELEMENTS_MAX: Final = 1 << 24  # larger frames gain 0.2 % in size and cost parallelism
DENSE_FRAME_BYTES_MAX: Final = 8 * MIB  # `dense` and `wide` frames: what a decoder holds at once
RESTART_ELEMENTS: Final = 1 << 20  # 16 bytes each: 0.13 % at 1 % density
FRAMES_MAX: Final = 1 << 20
SEGMENTS_PER_FRAME_MAX: Final = 1 << 20
RUNS_PER_CUT_MAX: Final = 1 << 24  # those of segments among each other are expanded: 16 bytes each

# Chunks -------------------------------------------------------------------------------------------
CHUNK_BYTES_AIM: Final = 8 * MIB  # resume and caching are by chunk
CHUNK_BYTES_MAX: Final = 64 * MIB  # one chunk is held in memory whole, at most this much
CHUNK_HEADER_BYTES_MAX: Final = 4 * MIB
SIDE_FILE_BYTES_MAX: Final = 64 * MIB  # config, tokenizer; stored as one object each
SIDE_FILES_MAX: Final = 256
SIDE_FILE_NAME_BYTES_MAX: Final = 255

# Documents ----------------------------------------------------------------------------------------
DOCUMENT_BYTES_MAX: Final = 64 * MIB  # a layout of 10^5 tensors is 10 MB, a cut of grain 8 as much
DOCUMENT_DEPTH_MAX: Final = 64  # lists and objects: parsers recurse, on stacks of other sizes
DOCUMENT_VALUES_MAX: Final = 1 << 23  # commas and opening brackets: some 70 bytes each once parsed
CHUNKS_PER_MANIFEST_MAX: Final = 1 << 17
METADATA_BYTES_MAX: Final = 64 * 1024  # training metadata in a version record
INTEGER_MAX: Final = (1 << 53) - 1  # what every JSON reader can hold exactly (RFC 8785)

# The registry -------------------------------------------------------------------------------------
NAME_BYTES_MAX: Final = 128  # policies, channels, replicas
ACTOR_BYTES_MAX: Final = 256  # who moved a channel: an account, a host, a job
PLAN_STEPS_MAX: Final = 4096
PAGE_SIZE_MAX: Final = 1000
WAIT_SECONDS_MAX: Final = 60.0  # long-poll; proxies drop idle connections soon after
REASON_BYTES_MAX: Final = 4096
