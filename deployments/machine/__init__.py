"""Resources that the replicas of one machine share: cores, ports, claims on them, and the real-time scheduling class.

Enter: a folder for claims, counts, addresses. Leave: claims, which end with their process.
"""
