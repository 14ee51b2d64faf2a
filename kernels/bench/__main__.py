"""``python -m replayssm_quant.kernels.bench``: correctness gate, timing, report."""

import sys

from ..._paths import drop_checkout


def main() -> int:
    drop_checkout()
    words = [part for word in sys.argv[1:] for part in word.split("=", 1)]
    if any(word.endswith("_verify") for word in words):  # --op mamba2_verify, --op gdn_verify
        from .verify import main as verify_main

        return verify_main()
    from .run import main as run_main

    return run_main()


if __name__ == "__main__":
    sys.exit(main())
