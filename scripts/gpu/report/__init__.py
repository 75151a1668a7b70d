"""docs/gpu-results.md from the JSON files in docs/gpu: python3 -m scripts.gpu.report"""
